"""The policies: whether a later turn's prompt is computed where its history lies, or remotely.

Each is a small pure object: `choose(case) -> Choice`. The first turn and what no policy has a say
in (an absent pool, a full worker) are `streams/core/placement.py`'s, which also chooses the
workers and makes the case.
"""

from dataclasses import dataclass
from typing import Protocol

from schemas.records import Estimate, Reason
from streams.config import RouterSettings
from streams.core.pool import Worker

_GOLDEN = 0.6180339887498949  # the fractional part of the golden ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a policy may know of a later turn whose decode worker lives."""

    ticket: int  # number of this choice on this router, kept while the request waits
    prompt_tokens: int
    context_tokens: int  # of the session so far
    append_tokens: int  # that the decode worker would have to compute
    prefill_tokens: int  # that the prefill worker would have to compute
    max_tokens: int
    prefill_queue: float  # requests on prefill workers and in admission, per prefill worker
    load: float  # requests under way per worker
    slack_ms: int
    w_ttft: float
    w_tpot: float
    home: Worker  # the decode worker that holds the history
    prefill: Worker  # the best prefill worker by now, with credit or not
    now_ms: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Local or remote, what decided, and what was expected, where that was estimated."""

    local: bool
    reason: Reason
    estimate: Estimate | None = None


class Policy(Protocol):
    """What the placer calls."""

    def choose(self, case: Case) -> Choice:
        """Where to compute the prompt."""


class Conditional:
    """Remote only if much is to be computed and prefill workers get to it soon (Dynamo, 2025)."""

    def __init__(self, settings: RouterSettings) -> None:
        self._tokens_max = settings.max_local_prefill_tokens
        self._queue_max = settings.max_prefill_queue

    def choose(self, case: Case) -> Choice:
        """By length first, then by queue."""
        if case.append_tokens <= self._tokens_max:
            return Choice(True, Reason.BELOW_LENGTH)
        if case.prefill_queue >= self._queue_max:
            return Choice(True, Reason.PREFILL_QUEUE_LONG)
        return Choice(False, Reason.ABOVE_LENGTH)


class Static:
    """A fixed share of turns is local: 0 is plain disaggregation, 1 append-prefill (PPD).

    Tickets times the golden ratio, modulo 1, are a sequence of low discrepancy (Weyl; Kuipers and
    Niederreiter 1974): of any n consecutive choices share * n are local, but for O(log n).
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._share = settings.local_share

    def choose(self, case: Case) -> Choice:
        """By the ticket alone."""
        return Choice(case.ticket * _GOLDEN % 1.0 < self._share, Reason.FIXED_SHARE)
