"""The policies: whether a prompt is computed on a decode worker, or remotely.

Each is a small pure object: `choose(turn) -> Choice`. All are asked of a later turn, about the
worker where its history lies; `learned` and `conditional` also where no worker holds the history (a
first turn, or its worker is gone), about the decode worker where the answer would end soonest. What
no policy has a say in (an absent pool, a full worker) is `streams/core/placement/placer.py`'s,
which also chooses the workers and makes the turn.
"""

from typing import NamedTuple, Protocol

from schemas.errors import ConfigError
from schemas.frozen import frozen
from schemas.records import Estimate, Reason
from streams.config import RouterSettings
from streams.core.placement.ppd_table import PpdTable

PAIRS, ROUND_ROBIN = IN_TURN = ("pairs", "round_robin")  # `streams/core/placement/rotation.py`
NEVER_ASKED = ("replica", *IN_TURN)  # where a prompt is computed: it is known without them
NEVER_LOCAL = ("static", *NEVER_ASKED)  # where the policy has no say
_GOLDEN = 0.6180339887498949  # the fractional part of the golden ratio
_SLACK_SHARE = 0.25  # what is not the sooner way may be expected to take so much of the slack


@frozen
class PlacementTurn:
    """What a policy may know of a turn, and of the one decode worker that it is asked about."""

    ticket: int  # number of the choice on this router, from 1; kept while the request waits
    prompt_tokens: int
    context_tokens: int  # of the session so far
    append_tokens: int  # that the decode worker would have to compute
    prefill_tokens: int  # that the prefill worker would have to compute
    max_tokens: int
    prefill_queue: float  # requests on prefill workers and in admission, per prefill worker
    load: float  # `selection.load`
    slack_ms: int
    w_ttft: float
    w_tpot: float
    has_home: bool = True  # a living worker holds the history; otherwise there is no ticket
    alone: bool = False  # prefill workers could do nothing for it that this one could not
    local_ms: float = 0.0  # until its first token, as far as is known
    remote_ms: float = 0.0
    estimate: Estimate | None = None  # where one was asked for


class Choice(NamedTuple):
    """Local or remote, what decided, and what was expected, where that was estimated."""

    local: bool
    reason: Reason
    estimate: Estimate | None = None
    policy_reason: Reason = Reason.UNKNOWN  # where the placer says another one

    def overrule(self, reason: Reason, *, local: bool) -> "Choice":
        """So placed for that reason; what the policy said, of which the estimate tells, is kept."""
        return Choice(local, reason, self.estimate, self.reason)


class Policy(Protocol):
    """A policy as the placer calls it."""

    first_turns: bool  # asked of them too, and of later turns whose worker is gone

    def choose(self, turn: PlacementTurn) -> Choice:
        """Where to compute the prompt."""


class ConditionalPolicy:
    """Remote only if much is to be computed and prefill workers get to it soon (Dynamo, 2025), or
    sooner than the decode worker.

    What a decode worker holds of a prompt need not be computed, whoever's prefix it was.
    """

    first_turns = True

    def __init__(self, settings: RouterSettings) -> None:
        self._tokens_max = settings.max_local_prefill_tokens
        self._queue_max = settings.max_prefill_queue

    def choose(self, turn: PlacementTurn) -> Choice:
        """By length first, then by queue."""
        if turn.append_tokens <= self._tokens_max:
            return Choice(True, Reason.BELOW_LENGTH)
        if turn.prefill_queue >= self._queue_max and turn.local_ms <= turn.remote_ms:
            return Choice(True, Reason.PREFILL_QUEUE_LONG)
        return Choice(False, Reason.ABOVE_LENGTH)


class StaticPolicy:
    """A fixed share of turns is local: 0 is plain disaggregation, 1 append-prefill (PPD).

    Tickets times the golden ratio, modulo 1, are a sequence of low discrepancy (Weyl; Kuipers and
    Niederreiter 1974): of any n consecutive choices share * n are local, but for O(log n).
    """

    first_turns = False

    def __init__(self, settings: RouterSettings) -> None:
        self._share = settings.local_share

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by the number of the turn alone."""
        return Choice(turn.ticket * _GOLDEN % 1.0 < self._share, Reason.FIXED_SHARE)


class TablePolicy:
    """PPD, algorithm 1, phase 2: the score of the measured cell that is nearest to the turn."""

    first_turns = False

    def __init__(self, table: PpdTable) -> None:
        self._table = table

    def choose(self, turn: PlacementTurn) -> Choice:
        """Remote where nothing was measured for contexts of this length."""
        new_tokens = turn.prompt_tokens - turn.context_tokens
        at = self._table.bin_of(turn.context_tokens, new_tokens, turn.max_tokens, turn.load)
        cell = self._table.find(at)
        if cell is None:
            return Choice(False, Reason.TOO_LITTLE_KNOWN)
        estimate = Estimate(
            score=cell.score(turn.w_ttft, turn.w_tpot),
            samples=cell.samples,
            gain_ttft=cell.gain_ttft,
            loss_tpot=cell.loss_tpot,
        )
        return Choice(estimate.score > 0, Reason.TABLE, estimate)


class LearnedPolicy:
    """The score of PPD, with a price for KV that moves, from what was learned online; while that is
    too little, as `ConditionalPolicy`.

    Where no worker holds the history, it is asked about the best decode worker, and says remote
    until prefill and decode are known. A worker in both roles answers alone what no pure prefill
    worker would compute. Of any n other choices at most `explore_share` * n go the other way, so
    that what is not chosen is known too: none where the deadline is near or that way is expected to
    take long.
    """

    first_turns = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._fallback = ConditionalPolicy(settings)

    def choose(self, turn: PlacementTurn) -> Choice:
        """By the estimate of the turn, which must have one."""
        estimate = turn.estimate
        assert estimate is not None
        if estimate.samples < self._settings.samples_min:
            local, reason = self._assumes(turn), Reason.TOO_LITTLE_KNOWN
        else:
            local = turn.alone or (estimate.score > 0 and self._in_time(turn, estimate))
            reason = Reason.LEARNED
        if self._explores(turn, estimate.ttft_remote_ms if local else estimate.ttft_local_ms):
            local, reason = not local, Reason.EXPLORING
        return Choice(local, reason, estimate)

    def _assumes(self, turn: PlacementTurn) -> bool:
        if turn.alone or not turn.has_home:
            return turn.alone
        return self._fallback.choose(turn).local

    def _in_time(self, turn: PlacementTurn, estimate: Estimate) -> bool:
        """Whether no price for moving KV is paid with the deadline."""
        late_ms = max(estimate.ttft_remote_ms, _SLACK_SHARE * turn.slack_ms)
        return estimate.ttft_local_ms <= late_ms

    def _explores(self, turn: PlacementTurn, expected_ms: float) -> bool:
        share = self._settings.explore_share
        return (
            turn.has_home
            and int(turn.ticket * share) > int((turn.ticket - 1) * share)
            and turn.slack_ms >= self._settings.explore_slack_ms
            and expected_ms <= _SLACK_SHARE * turn.slack_ms
        )


def policies_by_name(settings: RouterSettings, table: PpdTable | None) -> dict[str, Policy]:
    """All that need no table, and `table` where there is one; raises ConfigError where the
    settings want that and there is none."""
    policies: dict[str, Policy] = {
        "learned": LearnedPolicy(settings),
        "conditional": ConditionalPolicy(settings),
        "static": StaticPolicy(settings),
        **dict.fromkeys(NEVER_ASKED, StaticPolicy(settings)),
    }
    if table is not None:
        policies["table"] = TablePolicy(table)
    if settings.policy not in policies:
        raise ConfigError(
            "router.table: expected the file of a table for policy table, found none; make one "
            "with `trivium plan ppd`"
        )
    return policies
