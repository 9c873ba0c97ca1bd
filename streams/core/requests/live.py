"""A live request and its parts: its state, its attempt, and the workers on which it stands.

`note` stores what a worker's phase reports of an attempt, and `step` returns the state that
follows; the live path and the rebuild use the same two. `LiveRequests` (`streams/core/tables.py`)
has the indexes of all. Only `streams/core/handlers` and `streams/core/router.py` change a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

import numpy as np

from schemas.frozen import frozen
from schemas.prefix import Words, chain, salt_of
from schemas.records import (
    Cancellation,
    CancelReason,
    Estimate,
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
    Unmet,
    WireError,
)
from schemas.rules.pairs import is_paired
from schemas.rules.tokens import token_count
from streams.core.fleet.placement_notes import PlacementNote
from streams.core.fleet.workers import Gateway, Life, Worker
from streams.core.requests.context import PromptContext
from streams.core.requests.probe_results import ProbeResult
from streams.core.states import STANDS_ON, TRANSITIONS, Side, State, Word

NOBODY: Life = ("", 0)
READERS_MAX = 8  # gateways of one request; the latest resumptions count
_LAST_WORDS = (PhaseKind.PREFILL_DONE, PhaseKind.FAILED)
_NEEDS_NO_KV = (PhaseKind.KV_RECEIVED, PhaseKind.KV_MISSED)
_TOKEN_BYTES = 4
UNTICKETED = 0
_PROBE_TOKENS = 2_048  # tokens of a prompt that are hashed at first
_NOTHING: Words = np.empty(0, np.uint64)

UNPLACED = (State.RETRIEVING, State.CONTINUING, State.QUEUED)


SessionKey = tuple[str, str]  # tenant and id


def session_key(record: Request | Session) -> SessionKey:
    """Return a session's key. It has the tenant, because tenants choose their ids themselves and
    never share a home worker or KV."""
    return record.tenant, record.session_id


def model_name(request: Request) -> str:
    """Return the name that the caller has asked for: an adapter's, or else the model's."""
    return request.adapter or request.model


@frozen
class WarmedPrefix:
    """A prompt's beginning that a worker was ordered to prefill."""

    life: tuple[str, int]
    tokens: int  # in whole blocks


@dataclass(slots=True, eq=False)
class RequestCase:
    """The input of placement; each call updates `session`, `waiting` and `before_decode`."""

    request: Request
    prompt_tokens: int
    max_tokens: int  # still to generate
    session: Session | None = None
    waiting: int = 0  # requests in admission
    before_decode: int = 0  # remote placements that wait for their decode worker
    ticket: int = UNTICKETED  # number of its choice between local and remote, from 1
    note: PlacementNote | None = None
    weights: tuple[float, float] | None = None  # of TTFT and TPOT, by its class or its own
    policy: str = ""  # the policy that places it
    warm: WarmedPrefix | None = None  # its beginning, prefilled during its search
    _chains: dict[int, Words] = field(default_factory=dict)

    @classmethod
    def from_request(cls, request: Request, prior_tokens: int = 0) -> "RequestCase":
        """Build a case; the last `prior_tokens` of the prompt belong to the answer."""
        max_tokens = request.sampling.max_tokens - prior_tokens
        return cls(request, token_count(request.prompt_tokens), max_tokens)

    def chain(self, block_size: int, is_held: Callable[[int, int], bool]) -> Sequence[int]:
        """Return hashes of the prompt's first blocks, as far as a worker may have them cached.

        More are computed only while the last one so far is cached: `is_held(hash, tokens)`, where
        `tokens` is the length of the prompt's part that the hash stands for.
        """
        salt = salt_of(self.request.cache_scope)
        hashes = self._chains.get(block_size, _NOTHING)
        hashed_tokens, last = hashes.size * block_size, hashes.item(-1) if hashes.size else None
        while self.prompt_tokens - hashed_tokens >= block_size:
            if last is not None and not is_held(last, hashed_tokens):
                break
            count = min(
                max(hashed_tokens, _PROBE_TOKENS, block_size), self.prompt_tokens - hashed_tokens
            )
            tokens = np.frombuffer(self.request.prompt_tokens, "<i4", count, 4 * hashed_tokens)
            new_hashes = chain(tokens, block_size, salt if last is None else last, hashed_tokens)
            hashes = new_hashes if last is None else np.concatenate([hashes, new_hashes])
            self._chains[block_size] = hashes
            hashed_tokens, last = hashes.size * block_size, hashes.item(-1)
        return hashes.data  # few of them are read, and a list would convert all to integers


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmetWishes:
    """The wishes that a placement does not meet, and why; empty texts mean met."""

    policy: str = ""
    orchestration: str = ""
    unmet: Unmet = Unmet.NONE


ALL_MET = UnmetWishes()


@frozen
class Placement:
    """How to run a request; `decode` is None while no decode worker has credit."""

    policy: str
    mode: Mode
    reason: Reason
    prefill: Worker | None = None
    decode: Worker | None = None
    orchestration: Orchestration = Orchestration.NONE
    w_ttft: float = 0.0
    w_tpot: float = 0.0
    load: float = 0.0
    first_ms: float = 0.0  # expected time from now to its first token
    estimate: Estimate | None = None
    prefill_cached_tokens: int = 0  # by the prefix index; 0 if unknown
    decode_cached_tokens: int = 0
    unmet_wishes: UnmetWishes = ALL_MET
    policy_reason: Reason = Reason.UNKNOWN

    @property
    def chosen(self) -> dict[Worker, int]:
        """Return the chosen workers, each with its cached tokens of the prompt by the index."""
        tokens_by_worker = {}
        if self.prefill is not None:
            tokens_by_worker[self.prefill] = self.prefill_cached_tokens
        if self.decode is not None:
            tokens_by_worker[self.decode] = self.decode_cached_tokens
        return tokens_by_worker


class Charge(NamedTuple):
    """A credit that a request spends on a worker, and the prompt tokens charged as its work."""

    life: Life
    tokens: int


@dataclass(slots=True)
class Attempt:
    """The latest attempt of a request; number 0 until the first placement, which begins a new one.

    `dispatch.py` begins it, workers' reports change it (`note`, `step`).
    """

    number: int = 0
    unheard: int = 0  # 1: the log may have work of a first attempt without its decision
    handed_unheard: bool = False  # likewise for work of a hand-over
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


@dataclass(slots=True)
class VoidAttempts:
    """Why earlier attempts are void. `endings.py` counts them, and rebuilds do."""

    faults: int = 0  # attempts at which workers failed
    losses: int = 0  # attempts that were lost with their workers, or that workers refused
    routers: int = 0  # how many routers raised while they applied an event of it
    reason: Reason | None = None  # why it must be placed again
    error: WireError | None = None  # of its last attempt


@dataclass(slots=True)
class AnswerReaders:
    """Who reads the answer; the request ends when all `gateways` are lost, unless there are none.

    `LiveRequests.resume` adds readers.
    """

    gateways: tuple[Gateway, ...] = ()
    resumed: bool = False  # its client has resumed the answer, at any gateway
    progress_deadline_ms: int = 0  # until then the router waits for their progress


@dataclass(slots=True)
class Passages:
    """What searches have put into the prompt and the answer (`retrievals.py`, `router.py`)."""

    notice: StreamRetrieved | None = None  # of its retrieval; not yet sent to the reader
    passage_ids: tuple[str, ...] = ()  # of the retrieved passages in its prompt
    tokens: int = 0  # that its retrieval added to the prompt
    probed: tuple[ProbeResult, ...] = ()  # results of the searches during its answer


class PriorAnswer(NamedTuple):
    """The part of the answer, from earlier attempts, that ends the prompt."""

    tokens: int = 0
    chars: int = 0


@dataclass(slots=True)
class WorkerTime:
    """The time that workers reported, for the usage record."""

    # In ms; by attempt, worker and kind of phase.
    worked_ms: dict[tuple[int, str, PhaseKind], int] = field(default_factory=dict)
    is_told: bool = False  # the usage is in the log already


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has arrived and has not ended."""

    request: Request
    request_id: str
    partition: int
    prompt_tokens: int
    queued_ms: int
    state: State = State.QUEUED
    sides: tuple[Side, ...] = ()  # on which it stands; the side that will end it is last
    attempt: Attempt = field(default_factory=Attempt)
    failures: VoidAttempts = field(default_factory=VoidAttempts)
    readers: AnswerReaders = field(default_factory=AnswerReaders)
    passages: Passages = field(default_factory=Passages)
    prior: PriorAnswer = field(default_factory=PriorAnswer)
    worker_time: WorkerTime = field(default_factory=WorkerTime)
    cancel: CancelReason | None = None
    case: RequestCase | None = None  # what placement has computed for it
    warm: WarmedPrefix | None = None  # a hint for placement, which rebuilds lose
    read_end: StreamEnd | None = None  # of a void attempt, which its readers have; set by rebuilds

    @property
    def next_attempt(self) -> int:
        """Return the attempt number of the next placement, or of an end by the router."""
        return self.attempt.number + self.attempt.unheard + 1

    def has_given_up(self, attempt: int) -> bool:
        """Return whether that attempt is void."""
        if attempt <= self.attempt.number:
            return attempt < self.attempt.number or self.state in UNPLACED
        return False

    @property
    def is_paired(self) -> bool:
        """Return whether prefill and decode run as a pair."""
        return is_paired(self.attempt.orchestration)

    @property
    def holders(self) -> tuple[Life, ...]:
        """Return the workers on which the attempt stands; the one that will end it is last."""
        return tuple([self.life_on(side) for side in self.sides])

    def life_on(self, side: Side) -> Life:
        """Return the worker incarnation that was chosen for a side."""
        return self.attempt.prefill if side is Side.PREFILL else self.attempt.decode

    @property
    def working(self) -> dict[Role, Charge]:
        """Return the charges of the workers to which the attempt was sent."""
        if self.state is not State.ALLOCATING:
            return self.attempt.charges
        return {
            role: charge
            for role, charge in self.attempt.charges.items()
            if role is not Role.PREFILL
        }

    @property
    def keeps_kv(self) -> bool:
        """Return whether the prefill worker keeps finished KV that decode may not have fetched."""
        return (
            self.attempt.orchestration is Orchestration.PREFILL_FIRST
            and self.state in (State.HANDING_OVER, State.DECODING, State.CANCELLING)
            and Role.PREFILL not in self.attempt.charges
            and not self.attempt.kv_received
        )

    def heeds(self, cancellation: Cancellation) -> bool:
        """Return whether this cancellation ends the request."""
        is_late = is_outdated(cancellation, taken_up=self.readers.resumed)
        return not is_late and may_cancel(cancellation, self.request)

    def enter(self, state: State) -> None:
        """Set the state and the sides that follow from it."""
        cancelling = state is State.CANCELLING
        self.sides = self.sides[-1:] if cancelling else STANDS_ON[state]
        self.state = state

    def take(self, context: PromptContext) -> None:
        """Replace the request's prompt with this context's."""
        plain_tokens = token_count(self.request.prompt_tokens)
        self.request, passages = context.request, self.passages
        self.prompt_tokens = token_count(context.request.prompt_tokens)
        passages.notice, passages.tokens = context.notice, self.prompt_tokens - plain_tokens
        passages.passage_ids = tuple(citation.passage_id for citation in context.notice.citations)

    def set_prior_answer(self, tokens: bytes, chars: int) -> None:
        """End the prompt with these `tokens` of the answer, whose text has `chars` characters."""
        if not self.prior.tokens and not tokens:
            return
        plain = self.request.prompt_tokens
        plain = plain[: len(plain) - self.prior.tokens * _TOKEN_BYTES]
        self.request = replace(self.request, prompt_tokens=plain + tokens)
        self.prior, self.case = PriorAnswer(token_count(tokens), chars), None
        self.prompt_tokens = token_count(self.request.prompt_tokens)

    def view(self) -> tuple[object, ...]:
        """Return the values that a rebuild from the log must reproduce; unplaced ones have few."""
        at, passages = self.attempt, self.passages
        identity = (self.request_id, self.partition, self.state, at.number)
        prompt = crc32(self.request.prompt_tokens)
        put_in = (prompt, passages.passage_ids, passages.probed, self.prior)
        worked = tuple(sorted(self.worker_time.worked_ms.items()))
        readers = self.readers.gateways, self.readers.resumed, worked
        if self.state in UNPLACED:
            return (*identity, self.cancel, readers, put_in, self.failures.reason)
        return (
            *identity,
            *(at.mode, at.orchestration, at.prefill, at.decode, self.holders),
            tuple(sorted(at.charges.items())),
            *(at.kv, at.kv_received, at.sent_tokens, at.sent_chars),
            *(at.first_token_ms, at.cached_tokens, self.cancel, readers, put_in),
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
        live.readers.gateways = ((request.gateway_id, request.gateway_started_ms),)
    return live


def with_reader(readers: tuple[Gateway, ...], gateway: Gateway) -> tuple[Gateway, ...]:
    """Return the readers of an answer after it was resumed at `gateway`.

    Empty stays empty: such a request does not depend on its gateways.
    """
    if not readers or gateway in readers:
        return readers
    return (*readers, gateway)[-READERS_MAX:]


def is_loss(reason: Reason) -> bool:
    """Return whether an attempt was voided because a worker was lost or refused it."""
    return reason in (Reason.WORKER_LOST, Reason.KV_PRODUCER_GONE, Reason.WORKER_REFUSED)


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
    if phase.kind in _NEEDS_NO_KV and life == live.attempt.decode:
        live.attempt.kv_received = True
    elif phase.kind is PhaseKind.PREFILL_DONE and life == live.attempt.prefill:
        if not live.attempt.first_token_ms:
            live.attempt.sent_tokens, live.attempt.sent_chars = phase.sent_tokens, phase.sent_chars
            live.attempt.cached_tokens = phase.cached_tokens
            writing_ms = int(phase.transfer_ms) if live.is_paired else 0  # after the first token
            live.attempt.first_token_ms = phase.ended_ms - writing_ms


def note_work(live: LiveRequest, phase: Phase) -> None:
    """Store how long a worker spent on an attempt whose outcome does not report it.

    Void attempts count too, because their time was spent.
    """
    spent_ms = phase.ended_ms - phase.started_ms
    if phase.kind in _LAST_WORDS and spent_ms > 0:
        live.worker_time.worked_ms[phase.attempt, phase.worker_id, phase.kind] = spent_ms


def step(live: LiveRequest, life: Life, word: Word, kv: KvHandle | None = None) -> State | None:
    """Return the state to which a worker's report takes the attempt; None if the report is stale.

    Sets `live.attempt.kv` to what the next dispatch needs: KV to fetch, or blocks to write KV to.
    """
    for side in live.sides:
        following = TRANSITIONS.get((live.state, side, word))
        if life != live.life_on(side) or following is None:
            continue
        if following is State.PAIRED and kv is None:
            return None  # the report names no blocks
        live.attempt.kv = kv if following in (State.HANDING_OVER, State.PAIRED) else None
        return following
    return None
