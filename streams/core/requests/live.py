"""Live requests: their states, the workers on which they stand, and indexes of them.

`note` stores what a worker's phase reports of an attempt, and `step` returns the state that
follows; the live path and the rebuild use the same two. Keeps indexes consistent and bounded;
decides nothing else. Only `streams/core/handlers` and `router.py` change live requests.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar
from zlib import crc32

from schemas.records import (
    Cancellation,
    CancelReason,
    KvHandle,
    Mode,
    Orchestration,
    Phase,
    PhaseKind,
    Reason,
    Request,
    Role,
    Session,
    StreamEnd,
    StreamRetrieved,
    WireError,
)
from schemas.rules.pairs import is_paired
from schemas.rules.tokens import token_count
from streams.core.fleet.workers import Gateway, Life
from streams.core.placement.case import RequestCase, WarmedPrefix
from streams.core.requests.context import PromptContext
from streams.core.requests.probe_results import ProbeResult
from streams.core.states import ON_WORKERS, STANDS_ON, TRANSITIONS, Side, State, Word

Key = TypeVar("Key")
NOBODY: Life = ("", 0)
READERS_MAX = 8  # gateways of one request; the latest resumptions count
_DEADLINES_SPARE = 1_024  # entries of ended requests, beyond twice the number of live requests
_LAST_WORDS = (PhaseKind.PREFILL_DONE, PhaseKind.FAILED)
_NEEDS_NO_KV = (PhaseKind.KV_RECEIVED, PhaseKind.KV_MISSED)
_BEFORE_DECODE = (State.PREFILLING, State.HANDING_OVER)
_TOKEN_BYTES = 4
_LEFT = (State.CONTINUING, State.QUEUED, State.ENDED)
UNPLACED = (State.RETRIEVING, State.CONTINUING, State.QUEUED)
_WITH_DECODE = {state for state in ON_WORKERS if Side.DECODE in STANDS_ON[state]}


SessionKey = tuple[str, str]  # tenant and id


def session_key(record: Request | Session) -> SessionKey:
    """Return a session's key. It has the tenant, because tenants choose their ids themselves and
    never share a home worker or KV."""
    return record.tenant, record.session_id


class Charge(NamedTuple):
    """A credit that a request spends on a worker, and the prompt tokens charged as its work."""

    life: Life
    tokens: int


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has arrived and has not ended."""

    request: Request
    request_id: str
    partition: int
    prompt_tokens: int
    queued_ms: int
    readers: tuple[Gateway, ...] = ()  # it ends when all are lost; empty: it depends on no reader
    taken_up: bool = False  # its client has resumed the answer, at any gateway
    state: State = State.QUEUED
    sides: tuple[Side, ...] = ()  # on which it stands; the side that will end it is last
    attempt: int = 0
    unheard: int = 0  # 1: the log may have work of a first attempt without its decision
    handed_unheard: bool = False  # likewise for work of a hand-over
    faults: int = 0  # attempts at which workers failed
    losses: int = 0  # attempts that were lost with their workers, or that workers refused
    placed_ms: int = 0
    mode: Mode = Mode.NONE
    orchestration: Orchestration = Orchestration.NONE
    prefill: Life = NOBODY
    decode: Life = NOBODY
    charges: dict[Role, Charge] = field(default_factory=dict)  # by the worker's role
    kv: KvHandle | None = None  # for the next dispatch: KV to fetch, or blocks to write to
    kv_received: bool = False  # the decode worker has the KV, or computes it after a miss
    sent_tokens: int = 0
    sent_chars: int = 0
    first_token_ms: int = 0  # on the clock of the worker that sampled it
    first_heard_ms: int = 0  # when this router read prefill's report of it
    cached_tokens: int = 0
    cancel: CancelReason | None = None
    replaced_for: Reason | None = None  # why it must be placed again
    error: WireError | None = None  # of its last attempt
    failed_tries: int = 0  # how many routers raised while they applied an event of it
    case: RequestCase | None = None  # what placement has computed for it
    notice: StreamRetrieved | None = None  # of its retrieval; not yet sent to the reader
    passage_ids: tuple[str, ...] = ()  # of the retrieved passages in its prompt
    warm: WarmedPrefix | None = None  # a hint for placement, which rebuilds lose
    probed: tuple[ProbeResult, ...] = ()  # results of the searches during its answer
    retrieved_tokens: int = 0  # tokens that its retrieval added to the prompt
    prior_tokens: int = 0  # tokens of the answer, from earlier attempts, that end the prompt
    prior_chars: int = 0
    progress_deadline_ms: int = 0  # until then the router waits for its readers' progress
    # Time that workers reported, in ms; by attempt, worker and kind of phase.
    worked_ms: dict[tuple[int, str, PhaseKind], int] = field(default_factory=dict)
    is_told: bool = False  # its usage is in the log already
    read_end: StreamEnd | None = None  # of a void attempt, which its readers have; set by rebuilds

    @property
    def next_attempt(self) -> int:
        """Return the attempt number of the next placement, or of an end by the router."""
        return self.attempt + self.unheard + 1

    def has_given_up(self, attempt: int) -> bool:
        """Return whether that attempt is void."""
        if attempt <= self.attempt:
            return attempt < self.attempt or self.state in UNPLACED
        return False

    @property
    def is_paired(self) -> bool:
        """Return whether prefill and decode run as a pair."""
        return is_paired(self.orchestration)

    @property
    def holders(self) -> tuple[Life, ...]:
        """Return the workers on which the attempt stands; the one that will end it is last."""
        return tuple([self.life_on(side) for side in self.sides])

    def life_on(self, side: Side) -> Life:
        """Return the worker incarnation that was chosen for a side."""
        return self.prefill if side is Side.PREFILL else self.decode

    @property
    def working(self) -> dict[Role, Charge]:
        """Return the charges of the workers to which the attempt was sent."""
        if self.state is not State.ALLOCATING:
            return self.charges
        return {role: charge for role, charge in self.charges.items() if role is not Role.PREFILL}

    @property
    def keeps_kv(self) -> bool:
        """Return whether the prefill worker keeps finished KV that decode may not have fetched."""
        return (
            self.orchestration is Orchestration.PREFILL_FIRST
            and self.state in (State.HANDING_OVER, State.DECODING, State.CANCELLING)
            and Role.PREFILL not in self.charges
            and not self.kv_received
        )

    def heeds(self, cancellation: Cancellation) -> bool:
        """Return whether this cancellation ends the request."""
        is_late = is_outdated(cancellation, taken_up=self.taken_up)
        return not is_late and may_cancel(cancellation, self.request)

    def enter(self, state: State) -> None:
        """Set the state and the sides that follow from it."""
        cancelling = state is State.CANCELLING
        self.sides = self.sides[-1:] if cancelling else STANDS_ON[state]
        self.state = state

    def take(self, context: PromptContext) -> None:
        """Replace the request's prompt with this context's."""
        plain_tokens = token_count(self.request.prompt_tokens)
        self.request, self.notice = context.request, context.notice
        self.passage_ids = tuple(citation.passage_id for citation in context.notice.citations)
        self.prompt_tokens = token_count(context.request.prompt_tokens)
        self.retrieved_tokens = self.prompt_tokens - plain_tokens

    def set_prior_answer(self, tokens: bytes, chars: int) -> None:
        """End the prompt with these `tokens` of the answer, whose text has `chars` characters."""
        if not self.prior_tokens and not tokens:
            return
        plain = self.request.prompt_tokens
        plain = plain[: len(plain) - self.prior_tokens * _TOKEN_BYTES]
        self.request = replace(self.request, prompt_tokens=plain + tokens)
        self.prior_tokens, self.prior_chars, self.case = token_count(tokens), chars, None
        self.prompt_tokens = token_count(self.request.prompt_tokens)

    def view(self) -> tuple[object, ...]:
        """Return the values that a rebuild from the log must reproduce; unplaced ones have few."""
        identity = (self.request_id, self.partition, self.state, self.attempt)
        prompt = crc32(self.request.prompt_tokens)
        put_in = (prompt, self.passage_ids, self.probed, self.prior_tokens, self.prior_chars)
        worked = tuple(sorted(self.worked_ms.items()))
        readers = self.readers, self.taken_up, worked
        if self.state in UNPLACED:
            return (*identity, self.cancel, readers, put_in)
        return (
            *identity,
            *(self.mode, self.orchestration, self.prefill, self.decode, self.holders),
            tuple(sorted(self.charges.items())),
            *(self.kv, self.kv_received, self.sent_tokens, self.sent_chars),
            *(self.first_token_ms, self.cached_tokens, self.cancel, readers, put_in),
        )


def new_live_request(request: Request, partition: int) -> LiveRequest:
    """Return a request as it arrives; its wait counts from the gateway, across restarts."""
    live = LiveRequest(
        request,
        request.request_id,
        partition,
        token_count(request.prompt_tokens),
        queued_ms=request.arrived_ms,
    )
    if request.gateway_started_ms and not request.keeps_running:
        live.readers = ((request.gateway_id, request.gateway_started_ms),)
    return live


def with_reader(readers: tuple[Gateway, ...], gateway: Gateway) -> tuple[Gateway, ...]:
    """Return the readers of an answer after it was resumed at `gateway`.

    Empty stays empty: such a request does not depend on its gateways.
    """
    if not readers or gateway in readers:
        return readers
    return (*readers, gateway)[-READERS_MAX:]


def is_loss(reason: Reason) -> bool:
    """Return whether an attempt was voided because its worker was lost or refused it."""
    return reason in (Reason.WORKER_LOST, Reason.WORKER_REFUSED)


def is_fault(reason: Reason) -> bool:
    """Return whether an attempt was voided because a worker failed at it."""
    return not is_loss(reason) and reason is not Reason.ROUTER_RESTARTED


def may_cancel(cancellation: Cancellation, request: Request) -> bool:
    """Return whether the writer of the cancellation may cancel the request."""
    return cancellation.tenant in ("", request.tenant)


def is_outdated(cancellation: Cancellation, *, taken_up: bool) -> bool:
    """Return whether it reports a broken connection after its client has resumed the answer.

    A gateway that was frozen finds its clients gone when it wakes, long after they reconnected.
    """
    return taken_up and cancellation.reason is CancelReason.CLIENT_GONE


def note(live: LiveRequest, phase: Phase) -> None:
    """Store the facts that a phase of the attempt reports, whatever the request's state."""
    life = phase.worker_id, phase.worker_epoch
    if phase.kind in _NEEDS_NO_KV and life == live.decode:
        live.kv_received = True
    elif phase.kind is PhaseKind.PREFILL_DONE and life == live.prefill:
        if not live.first_token_ms:
            live.sent_tokens, live.sent_chars = phase.sent_tokens, phase.sent_chars
            live.cached_tokens = phase.cached_tokens
            writing_ms = int(phase.transfer_ms) if live.is_paired else 0  # after the first token
            live.first_token_ms = phase.ended_ms - writing_ms


def note_work(live: LiveRequest, phase: Phase) -> None:
    """Store how long a worker spent on an attempt whose outcome does not report it.

    Void attempts count too, because their time was spent.
    """
    spent_ms = phase.ended_ms - phase.started_ms
    if phase.kind in _LAST_WORDS and spent_ms > 0:
        live.worked_ms[phase.attempt, phase.worker_id, phase.kind] = spent_ms


def step(live: LiveRequest, life: Life, word: Word, kv: KvHandle | None = None) -> State | None:
    """Return the state to which a worker's report takes the attempt; None if the report is stale.

    Sets `live.kv` to what the next dispatch needs: KV to fetch, or blocks to write KV to.
    """
    for side in live.sides:
        following = TRANSITIONS.get((live.state, side, word))
        if life != live.life_on(side) or following is None:
            continue
        if following is State.PAIRED and kv is None:
            return None  # the report names no blocks
        live.kv = kv if following in (State.HANDING_OVER, State.PAIRED) else None
        return following
    return None


class LiveRequests:
    """Live requests by id, worker, reader, session and deadline."""

    def __init__(self) -> None:
        self.by_id: dict[str, LiveRequest] = {}
        self.handovers: dict[str, LiveRequest] = {}  # first in, first out
        self.before_decode = 0  # prefilling or handing over
        self.retrieving = 0
        # The latest request of each session that reached a decode worker.
        self.by_session: dict[SessionKey, LiveRequest] = {}
        self._by_worker: dict[Life, dict[str, LiveRequest]] = {}
        self._by_reader: dict[Gateway, dict[str, LiveRequest]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._seq = 0

    @property
    def by_worker(self) -> Mapping[Life, Mapping[str, LiveRequest]]:
        """Return the requests that stand on each worker incarnation."""
        return self._by_worker

    @property
    def readers(self) -> Mapping[Gateway, Mapping[str, LiveRequest]]:
        """Return the requests that each gateway process reads."""
        return self._by_reader

    def add(self, live: LiveRequest) -> None:
        """Add a request in any state to the indexes, and watch its deadline."""
        state, live.state, live.sides = live.state, State.QUEUED, ()
        self.by_id[live.request_id] = live
        _enter(self._by_reader, live.readers, live)
        self.watch(live, live.request.deadline_ms)
        self.move(live, state)

    def resume(self, live: LiveRequest, gateway: Gateway) -> None:
        """Add the gateway to the answer's readers."""
        live.taken_up = True
        _leave(self._by_reader, live.readers, live)
        live.readers = with_reader(live.readers, gateway)
        _enter(self._by_reader, live.readers, live)

    def watch(self, live: LiveRequest, at_ms: int) -> None:
        """Have `due` return the request at this time."""
        self._seq += 1
        heappush(self._deadlines, (at_ms, self._seq, live.request_id))
        if len(self._deadlines) > 2 * len(self.by_id) + _DEADLINES_SPARE:
            self._deadlines = [timer for timer in self._deadlines if timer[2] in self.by_id]
            heapify(self._deadlines)

    def due(self, now_ms: int) -> list[LiveRequest]:
        """Return each live request whose watched time has come, once."""
        due_requests: dict[LiveRequest, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            live = self.by_id.get(heappop(self._deadlines)[2])
            if live is not None:
                due_requests[live] = None
        return list(due_requests)

    def move(self, live: LiveRequest, state: State) -> None:
        """Change a request's state, and with it its place in all indexes."""
        if state is live.state:
            return
        before, old_holders = live.state, live.holders
        live.enter(state)
        holders = live.holders
        if holders != old_holders:
            _leave(self._by_worker, [life for life in old_holders if life not in holders], live)
            _enter(self._by_worker, holders, live)
        self.retrieving += (state is State.RETRIEVING) - (before is State.RETRIEVING)
        if before in _BEFORE_DECODE:
            self.before_decode -= 1
            self.handovers.pop(live.request_id, None)
        if state in _BEFORE_DECODE:
            self.before_decode += 1
        if state is State.HANDING_OVER:
            self.handovers[live.request_id] = live
        session = session_key(live.request)
        if (before, state) == (State.PAIRED, State.RECEIVED):
            pass  # it is in `by_session` since it was paired, unless a later request replaced it
        elif state in _WITH_DECODE:
            self.by_session[session] = live
        elif state in _LEFT and self.by_session.get(session) is live:
            del self.by_session[session]

    def drop(self, live: LiveRequest) -> None:
        """Take a request out of all indexes."""
        self.move(live, State.ENDED)
        _leave(self._by_reader, live.readers, live)
        del self.by_id[live.request_id]

    def of_partition(self, partition: int) -> list[LiveRequest]:
        """Return the live requests of a partition, in order of arrival."""
        return [live for live in self.by_id.values() if live.partition == partition]


def _enter(
    index: dict[Key, dict[str, LiveRequest]], keys: Iterable[Key], live: LiveRequest
) -> None:
    for key in keys:
        index.setdefault(key, {})[live.request_id] = live


def _leave(
    index: dict[Key, dict[str, LiveRequest]], keys: Iterable[Key], live: LiveRequest
) -> None:
    for key in keys:
        del index[key][live.request_id]
        if not index[key]:
            del index[key]
