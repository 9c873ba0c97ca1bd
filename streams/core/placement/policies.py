"""The policies: they choose whether a decode worker computes a prompt, or a prefill worker.

Each is a small pure object: `choose(turn) -> Choice`. For a later turn, all choose about the worker
with its history. If no worker has the history (a first turn, or its worker is lost), only `learned`
and `conditional` choose, about the decode worker where the answer would end soonest.
`streams/core/placement/placer.py` calls them. It handles the cases without a choice (an absent
pool, a full worker), chooses the workers and makes the turn.
"""

from typing import NamedTuple, Protocol

from schemas.errors import ConfigError
from schemas.frozen import frozen
from schemas.records import Estimate, Reason
from streams.config import RouterSettings
from streams.core.placement.ppd_table import PpdTable

PAIRS, ROUND_ROBIN = IN_TURN = ("pairs", "round_robin")  # `streams/core/placement/rotation.py`
NEVER_ASKED = ("replica", *IN_TURN)  # their names alone fix where a prompt is computed
NEVER_LOCAL = ("static", *NEVER_ASKED)  # never local where no policy is asked
_GOLDEN = 0.6180339887498949  # the fractional part of the golden ratio
_SLACK_SHARE = 0.25  # of the slack: the most that the slower alternative may take


@frozen
class PlacementTurn:
    """A policy's input: a turn, and the one decode worker that the policy is asked about."""

    ticket: int  # number of the choice on this router, from 1; kept while the request waits
    prompt_tokens: int
    context_tokens: int  # of the session so far
    append_tokens: int  # that the decode worker would compute
    prefill_tokens: int  # that the prefill worker would compute
    max_tokens: int
    prefill_queue: float  # requests on prefill workers and in admission, per prefill worker
    load: float  # `selection.load`
    slack_ms: int
    w_ttft: float
    w_tpot: float
    has_home: bool = True  # a living worker has the history; otherwise there is no ticket
    alone: bool = False  # prefill workers have no advantage over this worker
    local_ms: float = 0.0  # estimated time to its first token
    remote_ms: float = 0.0
    estimate: Estimate | None = None  # only for `learned`


class Choice(NamedTuple):
    """A choice of local or remote, its reason, and its estimate, if any."""

    local: bool
    reason: Reason
    estimate: Estimate | None = None
    policy_reason: Reason = Reason.UNKNOWN  # if the placer overruled it

    def overrule(self, reason: Reason, *, local: bool) -> "Choice":
        """Return the overruling choice for `reason`; keep the policy's reason and its estimate."""
        return Choice(local, reason, self.estimate, self.reason)


class Policy(Protocol):
    """A policy as the placer calls it."""

    first_turns: bool  # also asked about first turns, and later ones whose worker is lost

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose where to compute the prompt."""


class ConditionalPolicy:
    """Remote only if the prompt has many tokens to compute, and prefill workers start soon (Dynamo,
    2025) or sooner than the decode worker.

    Tokens that the decode worker has cached do not count, whichever session cached them.
    """

    first_turns = True

    def __init__(self, settings: RouterSettings) -> None:
        self._tokens_max = settings.max_local_prefill_tokens
        self._queue_max = settings.max_prefill_queue

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by length first, then by queue."""
        if turn.append_tokens <= self._tokens_max:
            return Choice(True, Reason.BELOW_LENGTH)
        if turn.prefill_queue >= self._queue_max and turn.local_ms <= turn.remote_ms:
            return Choice(True, Reason.PREFILL_QUEUE_LONG)
        return Choice(False, Reason.ABOVE_LENGTH)


class StaticPolicy:
    """A fixed share of turns is local: 0 is plain disaggregation, 1 append-prefill (PPD).

    Tickets times the golden ratio, modulo 1, are a sequence of low discrepancy (Weyl; Kuipers and
    Niederreiter 1974): of any n consecutive choices share * n are local, up to O(log n).
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
        """Choose by the cell's score; remote if the table has no cell for this context length."""
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
    """The score of PPD with a price for moving KV, from estimates learned online; with too few
    samples as `ConditionalPolicy`.

    If no worker has the history, it chooses about the best decode worker, and chooses remote until
    prefill and decode have enough samples. A worker in both roles keeps prompts for which prefill
    workers have no advantage. Of any n choices with a history, at most `explore_share` * n are
    reversed, so that the alternative is measured too: none if the deadline is near or if the
    alternative should take long.
    """

    first_turns = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._fallback = ConditionalPolicy(settings)

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by the turn's estimate, which must not be None."""
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
        """Return whether local is fast enough, so that saving a KV move costs no deadline."""
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
    """Return all policies by name; `table` only with a table. Raise ConfigError if the settings
    name that policy and there is no table."""
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
