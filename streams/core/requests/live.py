"""Live requests: where each is, on which workers it stands, and the indexes that find them.

`note` and `step` are what a worker's phase tells of an attempt, and where it takes it; the live
path and the rebuild use the same two. Keeps indexes consistent and bounded; decides nothing else.
Only `streams/core/handlers` and `router.py` change what is here.
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
from streams.core.requests.sessions import SessionKey, session_key
from streams.core.states import ON_WORKERS, STANDS_ON, TRANSITIONS, Side, State, Word

Key = TypeVar("Key")
NOBODY: Life = ("", 0)
READERS_MAX = 8  # gateways of one request; where it was resumed last counts
_DEADLINES_SPARE = 1_024  # of ended requests, kept beside as many of live ones
_LAST_WORDS = (PhaseKind.PREFILL_DONE, PhaseKind.FAILED)
_NEEDS_NO_KV = (PhaseKind.KV_RECEIVED, PhaseKind.KV_MISSED)
_BEFORE_DECODE = (State.PREFILLING, State.HANDING_OVER)
_TOKEN_BYTES = 4
_LEFT = (State.CONTINUING, State.QUEUED, State.ENDED)
UNPLACED = (State.RETRIEVING, State.CONTINUING, State.QUEUED)
_WITH_DECODE = {state for state in ON_WORKERS if Side.DECODE in STANDS_ON[state]}


class Charge(NamedTuple):
    """A credit that a request spends on a worker, and the prompt tokens that count as its work."""

    life: Life
    tokens: int


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request that is live."""

    request: Request
    request_id: str
    partition: int
    prompt_tokens: int
    queued_ms: int
    readers: tuple[Gateway, ...] = ()  # without any of them it ends; none: it depends on nobody
    taken_up: bool = False  # its client went on reading, at whichever gateway
    state: State = State.QUEUED
    sides: tuple[Side, ...] = ()  # on which it stands, the one that will end it last
    attempt: int = 0
    unheard: int = 0  # 1: the log may hold work of a first attempt, and no decision
    handed_unheard: bool = False  # likewise work of a hand-over
    faults: int = 0  # attempts that workers failed
    losses: int = 0  # attempts that were lost with their workers, or for which they had no room
    placed_ms: int = 0
    mode: Mode = Mode.NONE
    orchestration: Orchestration = Orchestration.NONE
    prefill: Life = NOBODY
    decode: Life = NOBODY
    charges: dict[Role, Charge] = field(default_factory=dict)  # by the role of the worker
    kv: KvHandle | None = None  # what the next dispatch needs: KV to fetch, or room to write to
    kv_received: bool = False  # or computed where it was missed
    sent_tokens: int = 0
    sent_chars: int = 0
    first_token_ms: int = 0  # on the clock of the worker that made it
    first_heard_ms: int = 0  # when this router heard of it from prefill
    cached_tokens: int = 0
    cancel: CancelReason | None = None
    replaced_for: Reason | None = None  # why it is to be placed again
    error: WireError | None = None  # how its last attempt failed
    failed_tries: int = 0  # how often a router ended over it
    case: RequestCase | None = None  # what placement has computed for it
    notice: StreamRetrieved | None = None  # what its reader is to hear of its prompt
    passage_ids: tuple[str, ...] = ()  # passages that were found for its prompt and stand in it
    warm: WarmedPrefix | None = None  # a hint for placement, which no rebuild knows
    probed: tuple[ProbeResult, ...] = ()  # what searches during its answer have come to
    retrieved_tokens: int = 0  # of its prompt
    prior_tokens: int = 0  # how many tokens of its prompt, the last ones, are of its answer
    prior_chars: int = 0
    progress_deadline_ms: int = 0  # so long it is waited for word of them
    # How long workers had it, as far as they have told; by attempt, worker and what it did.
    worked_ms: dict[tuple[int, str, PhaseKind], int] = field(default_factory=dict)
    is_told: bool = False  # what it has used is written already
    read_end: StreamEnd | None = None  # which its readers have: of a void attempt, in a rebuild

    @property
    def next_attempt(self) -> int:
        """The number of whatever comes next: another placement, or an end by the router."""
        return self.attempt + self.unheard + 1

    def has_given_up(self, attempt: int) -> bool:
        """Whether that attempt is void."""
        if attempt <= self.attempt:
            return attempt < self.attempt or self.state in UNPLACED
        return False

    @property
    def is_paired(self) -> bool:
        """Whether prefill and decode run as a pair."""
        return is_paired(self.orchestration)

    @property
    def holders(self) -> tuple[Life, ...]:
        """The workers with which the attempt stands and falls, the one that will end it last."""
        return tuple([self.life_on(side) for side in self.sides])

    def life_on(self, side: Side) -> Life:
        """The worker that was chosen for a side."""
        return self.prefill if side is Side.PREFILL else self.decode

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

    def heeds(self, cancellation: Cancellation) -> bool:
        """Whether it gives the request up."""
        is_late = is_outdated(cancellation, taken_up=self.taken_up)
        return not is_late and may_cancel(cancellation, self.request)

    def enter(self, state: State) -> None:
        """Change the state, and with it the sides."""
        cancelling = state is State.CANCELLING
        self.sides = self.sides[-1:] if cancelling else STANDS_ON[state]
        self.state = state

    def take(self, context: PromptContext) -> None:
        """Take this context's prompt as the request's own."""
        plain_tokens = token_count(self.request.prompt_tokens)
        self.request, self.notice = context.request, context.notice
        self.passage_ids = tuple(citation.passage_id for citation in context.notice.citations)
        self.prompt_tokens = token_count(context.request.prompt_tokens)
        self.retrieved_tokens = self.prompt_tokens - plain_tokens

    def set_prior_answer(self, tokens: bytes, chars: int) -> None:
        """End the prompt with these tokens of the answer, which are so many `chars`."""
        if not self.prior_tokens and not tokens:
            return
        plain = self.request.prompt_tokens
        plain = plain[: len(plain) - self.prior_tokens * _TOKEN_BYTES]
        self.request = replace(self.request, prompt_tokens=plain + tokens)
        self.prior_tokens, self.prior_chars, self.case = token_count(tokens), chars, None
        self.prompt_tokens = token_count(self.request.prompt_tokens)

    def view(self) -> tuple[object, ...]:
        """What a rebuild from the log has to give again; a queued request starts from nothing."""
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
    """A request as it arrives; its wait counts from the gateway, over restarts."""
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
    """Where an answer is read, once it was resumed at a gateway too.

    Nowhere stays nowhere: such a request does not depend on its gateways.
    """
    if not readers or gateway in readers:
        return readers
    return (*readers, gateway)[-READERS_MAX:]


def is_loss(reason: Reason) -> bool:
    """Whether an attempt was given up since its worker was not there for it, or had no room."""
    return reason in (Reason.WORKER_LOST, Reason.WORKER_REFUSED)


def is_fault(reason: Reason) -> bool:
    """Whether it was since a worker failed at it."""
    return not is_loss(reason) and reason is not Reason.ROUTER_RESTARTED


def may_cancel(cancellation: Cancellation, request: Request) -> bool:
    """Whether whoever wrote it may give the request up."""
    return cancellation.tenant in ("", request.tenant)


def is_outdated(cancellation: Cancellation, *, taken_up: bool) -> bool:
    """Whether it is word of a connection that broke, of a client that had gone on reading by then.

    A gateway that was frozen finds its clients gone when it wakes, long after they went elsewhere.
    """
    return taken_up and cancellation.reason is CancelReason.CLIENT_GONE


def note(live: LiveRequest, phase: Phase) -> None:
    """What a phase of the attempt tells, whatever the state that it finds."""
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
    """How long a worker had an attempt, where no outcome tells so: also of one that was given up,
    for its time was spent.
    """
    spent_ms = phase.ended_ms - phase.started_ms
    if phase.kind in _LAST_WORDS and spent_ms > 0:
        live.worked_ms[phase.attempt, phase.worker_id, phase.kind] = spent_ms


def step(live: LiveRequest, life: Life, word: Word, kv: KvHandle | None = None) -> State | None:
    """Where the word of a worker takes the attempt; None where the worker has no say in it.

    Sets `live.kv` to what the next dispatch needs: KV to fetch, or room to write KV to.
    """
    for side in live.sides:
        following = TRANSITIONS.get((live.state, side, word))
        if life != live.life_on(side) or following is None:
            continue
        if following is State.PAIRED and kv is None:
            return None  # it names no room
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
        # The latest of each that got to a decode worker.
        self.by_session: dict[SessionKey, LiveRequest] = {}
        self._by_worker: dict[Life, dict[str, LiveRequest]] = {}
        self._by_reader: dict[Gateway, dict[str, LiveRequest]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._seq = 0

    @property
    def by_worker(self) -> Mapping[Life, Mapping[str, LiveRequest]]:
        """What stands on each life of a worker."""
        return self._by_worker

    @property
    def readers(self) -> Mapping[Gateway, Mapping[str, LiveRequest]]:
        """What each process of a gateway reads."""
        return self._by_reader

    def add(self, live: LiveRequest) -> None:
        """Begin to watch a request, in whichever state it is, and its deadline."""
        state, live.state, live.sides = live.state, State.QUEUED, ()
        self.by_id[live.request_id] = live
        _enter(self._by_reader, live.readers, live)
        self.watch(live, live.request.deadline_ms)
        self.move(live, state)

    def resume(self, live: LiveRequest, gateway: Gateway) -> None:
        """The answer is read at that gateway too."""
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
        """Live requests whose watched time has come, each once."""
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
            pass  # it got no further than it was to its session
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
        """What lives in a partition, in order of arrival."""
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
