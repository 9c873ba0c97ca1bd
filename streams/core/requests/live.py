"""The table of live requests: their state, with whom they stand and fall, and which ids have ended.

Keeps indexes consistent and bounded; decides nothing. `streams/core/handlers/dispatch.py` and
`router.py` write to it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from schemas.records import (
    Cancellation,
    CancelReason,
    KvHandle,
    Mode,
    Orchestration,
    Reason,
    Request,
    Role,
    WireError,
)
from streams.core.fleet.members import Gateway, Life
from streams.core.fleet.readers import resumed_at
from streams.core.placement.case import Need

NOBODY: Life = ("", 0)
EARLY_CANCEL_MS = 60_000
_ENDED_SPARE = 1_024  # deadlines of ended requests that are kept beside as many of live ones


class State(StrEnum):
    """Where a live request is."""

    QUEUED = "queued"  # the router holds it, in admission
    PREFILLING = "prefilling"  # a prefill worker holds it
    HANDING_OVER = "handing_over"  # no decode credit yet; a prefill worker holds its KV
    ALLOCATING = "allocating"  # a decode worker makes room for what a chosen one will prefill
    PAIRED = "paired"  # a prefill and a decode worker hold it together
    DECODING = "decoding"  # a decode or replica worker holds it
    CANCELLING = "cancelling"  # the worker that will end it was told to stop


# Looked up once: naming a member of an enumeration costs more than comparing with it.
_QUEUED, _DECODING = State.QUEUED, State.DECODING
_UNDERWAY = (State.PREFILLING, State.HANDING_OVER)
_PAIRING = (State.ALLOCATING, State.PAIRED)
_DECODED = (*_PAIRING, _DECODING)
BEGINS = {
    Orchestration.PREFILL_FIRST: State.PREFILLING,
    Orchestration.DECODE_FIRST: State.ALLOCATING,
    Orchestration.CONCURRENT: State.PAIRED,
    Orchestration.NONE: State.DECODING,
}


class Charge(NamedTuple):
    """A credit that a request spends on a worker, and the prompt tokens that count as its work."""

    life: Life
    tokens: int


@dataclass(slots=True, eq=False)
class Live:
    """One live request. `holders` are the lives of workers with which this attempt stands and
    falls, the one that will end the request last."""

    request: Request
    request_id: str  # the request's, asked for often
    partition: int
    prompt_tokens: int
    queued_ms: int
    readers: tuple[Gateway, ...] = ()  # without any of them it ends; none: it depends on nobody
    state: State = State.QUEUED
    attempt: int = 0
    unheard: int = 0  # 1: the log may hold work of a first attempt, and no decision
    handed_unheard: bool = False  # likewise work of a hand-over
    faults: int = 0  # attempts that workers failed
    losses: int = 0  # attempts that were lost with their workers
    placed_ms: int = 0
    mode: Mode = Mode.NONE
    orchestration: Orchestration = Orchestration.NONE
    prefill: Life = NOBODY
    decode: Life = NOBODY
    holders: tuple[Life, ...] = ()
    charges: dict[Role, Charge] = field(default_factory=dict)  # by the role of the worker
    kv: KvHandle | None = None  # what the next dispatch needs: KV to fetch, or room to write to
    kv_received: bool = False
    sent_tokens: int = 0
    sent_chars: int = 0
    first_token_ms: int = 0  # on the clock of the worker that made it
    first_heard_ms: int = 0  # when this router heard of it from prefill
    cached_tokens: int = 0
    cancel: CancelReason | None = None
    again: Reason | None = None  # why it is to be placed again
    error: WireError | None = None  # how its last attempt failed
    failed_tries: int = 0  # how often a router ended over it
    need: Need | None = None  # what placement computed for it

    @property
    def next_attempt(self) -> int:
        """The number of whatever comes next: another placement, or an end by the router."""
        return self.attempt + self.unheard + 1

    @property
    def is_paired(self) -> bool:
        """Whether prefill and decode run as a pair."""
        return self.orchestration.is_paired

    @property
    def working(self) -> dict[Role, Charge]:
        """The charges of workers that have been sent the attempt."""
        if self.state is not State.ALLOCATING:
            return self.charges
        return {role: charge for role, charge in self.charges.items() if role is not Role.PREFILL}

    @property
    def keeps_kv(self) -> bool:
        """Whether the prefill worker keeps finished KV that nobody is known to have fetched."""
        return (
            self.orchestration is Orchestration.PREFILL_FIRST
            and self.state in (State.HANDING_OVER, State.DECODING, State.CANCELLING)
            and Role.PREFILL not in self.charges
            and not self.kv_received
        )

    def holders_in(self, state: State) -> tuple[Life, ...]:
        """The workers with which the attempt stands and falls in a state."""
        if state is _DECODING:
            return (self.decode,)
        if state in _UNDERWAY:
            return (self.prefill,)
        if state in _PAIRING:
            return self.prefill, self.decode
        return self.holders[-1:] if state is State.CANCELLING else ()

    def is_spare(self, life: Life) -> bool:
        """Whether the attempt goes on without this holder: the KV that it was to write is there."""
        return self.state is State.PAIRED and self.kv_received and life == self.prefill

    def view(self) -> tuple[object, ...]:
        """What a rebuild from the log has to give again; a queued request starts from nothing."""
        if self.state is State.QUEUED:
            queued = (self.request_id, self.partition, self.state, self.attempt, self.cancel)
            return (*queued, self.readers)
        return (
            *(self.request_id, self.partition, self.state, self.attempt, self.mode),
            *(
                self.orchestration,
                self.prefill,
                self.decode,
                self.holders,
                tuple(sorted(self.charges.items())),
            ),
            *(self.kv, self.kv_received, self.sent_tokens, self.sent_chars),
            *(self.first_token_ms, self.cached_tokens, self.cancel, self.readers),
        )


class RequestTable:
    """Live requests by id, life and deadline; ended ids; early cancellations."""

    def __init__(self, *, ended_max: int, early_cancels_max: int) -> None:
        self.live: dict[str, Live] = {}
        self.handovers: dict[str, Live] = {}  # first in, first out
        self.underway = 0  # prefilling or handing over
        self.by_life: dict[Life, dict[str, Live]] = {}
        self.by_reader: dict[Gateway, dict[str, Live]] = {}
        self.of_session: dict[str, Live] = {}  # the latest that has a decode worker
        self._ended_max = ended_max
        self._early_max = early_cancels_max
        self._deadlines: list[tuple[int, int, str]] = []
        self._ended: OrderedDict[str, tuple[int, int]] = OrderedDict()  # until_ms, partition
        self._early: OrderedDict[tuple[str, str], tuple[CancelReason, int, int]] = OrderedDict()
        self._seq = 0

    def add(self, live: Live) -> None:
        """Begin to watch a request and its deadline."""
        self.live[live.request_id] = live
        for reader in live.readers:
            self.by_reader.setdefault(reader, {})[live.request_id] = live
        self.watch(live, live.request.deadline_ms)

    def resumed(self, live: Live, gateway: Gateway) -> None:
        """The answer is read at that gateway too."""
        self._unread(live)
        live.readers = resumed_at(live.readers, gateway)
        for reader in live.readers:
            self.by_reader.setdefault(reader, {})[live.request_id] = live

    def _unread(self, live: Live) -> None:
        for reader in live.readers:
            del self.by_reader[reader][live.request_id]
            if not self.by_reader[reader]:
                del self.by_reader[reader]

    def watch(self, live: Live, at_ms: int) -> None:
        """Have `due` return the request at this time."""
        self._seq += 1
        heappush(self._deadlines, (at_ms, self._seq, live.request_id))
        if len(self._deadlines) > 2 * len(self.live) + _ENDED_SPARE:
            self._deadlines = [each for each in self._deadlines if each[2] in self.live]
            heapify(self._deadlines)

    def due(self, now_ms: int) -> list[Live]:
        """Live requests whose watched time has come."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            live = self.live.get(heappop(self._deadlines)[2])
            if live is not None:
                found.append(live)
        return found

    def move(self, live: Live, state: State) -> None:
        """Change a request's state, and with it the lives that it depends on, in all indexes."""
        if state is live.state is _QUEUED:
            return  # it is in no index
        holders = live.holders_in(state)
        if holders != live.holders:
            self._index(live, holders)
        if live.state in _UNDERWAY:
            self.underway -= 1
            self.handovers.pop(live.request_id, None)
        if state in _UNDERWAY:
            self.underway += 1
            if state is State.HANDING_OVER:
                self.handovers[live.request_id] = live
        live.state, live.holders = state, holders
        if state in _DECODED:
            self.of_session[live.request.session_id] = live
        elif state is _QUEUED and self.of_session.get(live.request.session_id) is live:
            del self.of_session[live.request.session_id]

    def _index(self, live: Live, holders: tuple[Life, ...]) -> None:
        for life in live.holders:
            if life not in holders:
                del self.by_life[life][live.request_id]
                if not self.by_life[life]:
                    del self.by_life[life]
        for life in holders:
            self.by_life.setdefault(life, {})[live.request_id] = live

    def remove(self, live: Live, until_ms: int) -> None:
        """The request has ended; its id is remembered."""
        self.drop(live)
        self.remember(live.request_id, until_ms, live.partition)

    def remember(self, request_id: str, until_ms: int, partition: int) -> None:
        """Remember an ended id, so that nothing revives it."""
        self._ended[request_id] = (until_ms, partition)
        if len(self._ended) > self._ended_max:
            self._ended.popitem(last=False)

    def drop(self, live: Live) -> None:
        """Take a request out of all indexes."""
        self.move(live, State.QUEUED)
        self._unread(live)
        del self.live[live.request_id]

    def has_ended(self, request_id: str) -> bool:
        """Whether the id is remembered as ended."""
        return request_id in self._ended

    def cancel_early(self, cancellation: Cancellation, partition: int, now_ms: int) -> None:
        """Remember a cancellation whose request is not known yet."""
        key = cancellation.request_id, cancellation.tenant
        self._early.setdefault(key, (cancellation.reason, partition, now_ms))
        while len(self._early) > self._early_max:
            self._early.popitem(last=False)

    def take_early(self, request: Request) -> CancelReason | None:
        """The cancellation that came before its request, if one did."""
        found = None
        for tenant in (request.tenant, ""):
            found = self._early.pop((request.request_id, tenant), (found, 0, 0))[0]
        return found

    def sweep(self, now_ms: int) -> None:
        """Forget ended ids and early cancellations whose time is over, oldest first."""
        while self._ended and next(iter(self._ended.values()))[0] <= now_ms:
            self._ended.popitem(last=False)
        while self._early and now_ms - next(iter(self._early.values()))[2] > EARLY_CANCEL_MS:
            self._early.popitem(last=False)

    def of_partition(self, partition: int) -> list[Live]:
        """What lives in a partition, in order of arrival."""
        return [live for live in self.live.values() if live.partition == partition]

    def forget_partition(self, partition: int) -> None:
        """Forget the ended ids and early cancellations of a partition."""
        for request_id in [r for r, (_, p) in self._ended.items() if p == partition]:
            del self._ended[request_id]
        for key in [key for key, (_, p, _) in self._early.items() if p == partition]:
            del self._early[key]


def may_cancel(cancellation: Cancellation, request: Request) -> bool:
    """Whether whoever wrote it may give the request up."""
    return cancellation.tenant in ("", request.tenant)
