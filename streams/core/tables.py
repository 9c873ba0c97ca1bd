"""The tables of a router: all its data about its partitions and the fleet.

`Router` creates one `RouterTables`, and only the handlers (`streams/core/handlers`) and `Router`
change it. Every table is bounded in number or age, and evicts the oldest entries first. What waits
is kept by model, so that a model without free workers delays no other one. `Sessions` is only a
hint: a lost entry costs a cache hit. `Demand` measures the last seconds, with averages that decay:
an event `MEMORY_MS` ago counts for a third (1/e). Decides nothing. `effects` has the effects of the
current event so far.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import exp
from typing import Final, TypeVar

from schemas.records import Cancellation, CancelReason, Request, Session
from streams.config import ASSUMED_PREFILL_TOKENS_PER_S, ASSUMED_STEP_MS, RouterSettings
from streams.core.effects import Effect
from streams.core.fleet.workers import Fleet, Gateway, Life
from streams.core.requests.admission import CLASSES, Admission, UnservedRequests
from streams.core.requests.context import SessionHistories
from streams.core.requests.live import LiveRequest, SessionKey, session_key, with_reader
from streams.core.states import ON_WORKERS, STANDS_ON, Side, State

EARLY_CANCEL_MS = 60_000
MEMORY_MS = 10_000.0


Key = TypeVar("Key")
_DEADLINES_SPARE = 1_024  # entries of ended requests, beyond twice the number of live requests
_BEFORE_DECODE = (State.PREFILLING, State.HANDING_OVER)
_LEFT = (State.CONTINUING, State.QUEUED, State.ENDED)
_WITH_DECODE = {state for state in ON_WORKERS if Side.DECODE in STANDS_ON[state]}


class ModelQueue:
    """The requests of one model that wait for workers, and the demand on these workers."""

    def __init__(self, model: str, settings: RouterSettings) -> None:
        self.model = model
        self.admission = Admission(
            requests_max=settings.queue_requests_max, tokens_max=settings.queue_tokens_max
        )
        self.unserved = UnservedRequests()
        self.demand = Demand()
        self.live = 0  # requests that have arrived and have not ended
        self.handovers: dict[str, LiveRequest] = {}  # first in, first out
        self.before_decode = 0  # prefilling or handing over
        self.retrieving = 0

    @property
    def waiting(self) -> int:
        """Return how many requests wait for a placement."""
        return len(self.admission) + len(self.unserved)

    def shed_unserved(self) -> list[str]:
        """Drop unserved requests that the queue has no room for; return their ids."""
        admission, shed = self.admission, list[str]()
        while self.unserved and (
            self.waiting > admission.requests_max
            or admission.tokens + self.unserved.tokens > admission.tokens_max
        ):
            shed.append(self.unserved.take_last())
        return shed


class ModelQueues:
    """The queues of all models that have live requests, had some lately, or have workers."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._queues: dict[str, ModelQueue] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def of(self, model: str) -> ModelQueue:
        """Return the queue of a model, or an empty one if it has had no request."""
        return self._queues.get(model) or ModelQueue(model, self._settings)

    def open(self, model: str) -> ModelQueue:
        """Return the queue of a model for a new request."""
        return self._queues.setdefault(model, self.of(model))

    def busy(self) -> list[ModelQueue]:
        """Return the queues with requests that wait for a placement or a hand-over."""
        return [queue for queue in self._queues.values() if queue.waiting or queue.handovers]

    def sweep(self, served: Container[str]) -> None:
        """Drop the queues of models without live requests that no worker serves."""
        self._queues = {
            model: queue for model, queue in self._queues.items() if queue.live or model in served
        }


class LiveRequests:
    """Live requests by id, worker, reader, session and deadline."""

    def __init__(self, queues: ModelQueues) -> None:
        """Create the indexes; `queues` have the requests that wait."""
        self.by_id: dict[str, LiveRequest] = {}
        self.retrieving = 0
        self._queues = queues
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
        self._queues.open(live.request.model).live += 1
        _enter(self._by_reader, live.readers.gateways, live)
        self.watch(live, live.request.deadline_ms)
        self.move(live, state)

    def resume(self, live: LiveRequest, gateway: Gateway) -> None:
        """Add the gateway to the answer's readers."""
        live.readers.resumed = True
        _leave(self._by_reader, live.readers.gateways, live)
        live.readers.gateways = with_reader(live.readers.gateways, gateway)
        _enter(self._by_reader, live.readers.gateways, live)

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
        queue = self._queues.of(live.request.model)
        retrieving = (state is State.RETRIEVING) - (before is State.RETRIEVING)
        self.retrieving += retrieving
        queue.retrieving += retrieving
        if before is State.QUEUED:
            queue.unserved.remove(live.request_id)
        if before in _BEFORE_DECODE:
            queue.before_decode -= 1
            queue.handovers.pop(live.request_id, None)
        if state in _BEFORE_DECODE:
            queue.before_decode += 1
        if state is State.HANDING_OVER:
            queue.handovers[live.request_id] = live
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
        _leave(self._by_reader, live.readers.gateways, live)
        del self.by_id[live.request_id]
        self._queues.of(live.request.model).live -= 1

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


class Sessions:
    """Sessions by `session_key`, each with its partition, in order of use."""

    def __init__(self, *, sessions_max: int, ttl_ms: int) -> None:
        self._sessions_max = sessions_max
        self._ttl_ms = ttl_ms
        self._sessions: OrderedDict[SessionKey, tuple[Session, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey, now_ms: int) -> Session | None:
        """Return the session, or None if it was evicted or is too old."""
        entry = self._sessions.get(key)
        if entry is None or now_ms - entry[0].last_used_ms > self._ttl_ms:
            return None
        return entry[0]

    def put(self, session: Session, partition: int) -> None:
        """Store the latest state of a session."""
        key = session_key(session)
        self._sessions[key] = (session, partition)
        self._sessions.move_to_end(key)

    def evict(self, now_ms: int) -> list[tuple[SessionKey, int]]:
        """Drop sessions that are too old or beyond the limit; return keys and partitions."""
        evicted = []
        while self._sessions:
            key, (session, partition) = next(iter(self._sessions.items()))
            too_old = now_ms - session.last_used_ms > self._ttl_ms
            if not too_old and len(self._sessions) <= self._sessions_max:
                break
            del self._sessions[key]
            evicted.append((key, partition))
        return evicted

    def drop(self, partition: int) -> None:
        """Drop a partition's sessions without a record: another router stores them now."""
        for key in [k for k, (_, p) in self._sessions.items() if p == partition]:
            del self._sessions[key]

    def all(self) -> dict[SessionKey, Session]:
        """Return all stored sessions by their keys."""
        return {key: session for key, (session, _) in self._sessions.items()}


class EndedIds:
    """Ids of ended requests, so that no late record starts one again."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._ids: OrderedDict[str, tuple[int, int]] = OrderedDict()  # until_ms, partition

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str, until_ms: int, partition: int) -> None:
        """Store an id until `until_ms`."""
        self._ids[request_id] = (until_ms, partition)
        if len(self._ids) > self._ids_max:
            self._ids.popitem(last=False)

    def sweep(self, now_ms: int) -> None:
        """Drop the ids whose time is over."""
        while self._ids and next(iter(self._ids.values()))[0] <= now_ms:
            self._ids.popitem(last=False)

    def forget_partition(self, partition: int) -> None:
        """Drop a partition's entries, because another router stores them now."""
        for request_id in [r for r, (_, p) in self._ids.items() if p == partition]:
            del self._ids[request_id]


EARLY_CANCELS_MAX: Final = 10_000  # far more than calls that end while their request is written


class EarlyCancellations:
    """Cancellations that arrived before their requests, the first of each tenant."""

    def __init__(self, cancellations_max: int = EARLY_CANCELS_MAX) -> None:
        self._max = cancellations_max
        self._cancellations: OrderedDict[tuple[str, str], tuple[CancelReason, int, int]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._cancellations)

    def add(self, cancellation: Cancellation, partition: int, now_ms: int) -> None:
        """Store a cancellation; the first one of each tenant counts."""
        key = cancellation.request_id, cancellation.tenant
        self._cancellations.setdefault(key, (cancellation.reason, partition, now_ms))
        while len(self._cancellations) > self._max:
            self._cancellations.popitem(last=False)

    def take(self, request: Request) -> CancelReason | None:
        """Remove a request's cancellations; return the reason of one that may cancel it, if any."""
        reason = None
        for tenant in (request.tenant, ""):
            reason = self._cancellations.pop((request.request_id, tenant), (reason, 0, 0))[0]
        return reason

    def sweep(self, now_ms: int) -> None:
        """Drop cancellations older than `EARLY_CANCEL_MS`."""
        while (
            self._cancellations
            and now_ms - next(iter(self._cancellations.values()))[2] > EARLY_CANCEL_MS
        ):
            self._cancellations.popitem(last=False)

    def forget_partition(self, partition: int) -> None:
        """Drop a partition's entries, because another router stores them now."""
        for key in [key for key, (_, p, _) in self._cancellations.items() if p == partition]:
            del self._cancellations[key]


class DecayingSums:
    """Sums that decay with time; the first one counts events."""

    __slots__ = ("_at_ms", "_since_ms", "_sums")

    def __init__(self, *names: str) -> None:
        self._sums = dict.fromkeys(("count", *names), 0.0)
        self._at_ms = self._since_ms = 0

    def add(self, now_ms: int, **values: float) -> None:
        """Count one more event, with its values."""
        decay = self._decay(now_ms)
        self._at_ms = max(self._at_ms, now_ms)
        self._since_ms = self._since_ms or now_ms
        values["count"] = 1.0
        self._sums = {name: decay * total + values[name] for name, total in self._sums.items()}

    def per_s(self, now_ms: int) -> float:
        """Return events per second; the first seconds are extrapolated, as if never different."""
        counted = self._decay(now_ms) * self._sums["count"]
        covered_share = 1 - exp(-max(1_000, now_ms - self._since_ms) / MEMORY_MS)
        return counted * 1_000 / MEMORY_MS / covered_share

    def mean(self, name: str) -> float:
        """Return the mean of one value; 0 if no event was counted."""
        count = self._sums["count"]
        return self._sums[name] / count if count else 0.0

    def _decay(self, now_ms: int) -> float:
        return exp(min(0, self._at_ms - now_ms) / MEMORY_MS)


class Demand:
    """Sums of the requests that were queued, placed and answered."""

    def __init__(self) -> None:
        self.queued = DecayingSums("prompt_tokens")
        self.placed = DecayingSums("prefill_ms", "append_ms")
        self.answered = DecayingSums("answer_tokens")


class RouterTables:
    """All tables of one router, one of each kind."""

    def __init__(self, router_id: str, settings: RouterSettings) -> None:
        self.router_id = router_id
        self.settings = settings
        self.fleet = Fleet(router_id)
        self.queues = ModelQueues(settings)
        self.requests = LiveRequests(self.queues)
        self.ended_ids = EndedIds(settings.ended_max)
        self.early_cancellations = EarlyCancellations()
        self.sessions = Sessions(sessions_max=settings.sessions_max, ttl_ms=settings.session_ttl_ms)
        self.histories = SessionHistories(
            sessions_max=settings.histories_max, bytes_max=settings.histories_bytes_max
        )
        self.shed: list[str] = []  # ids that left the full queue and have not ended yet
        self.effects: list[Effect] = []
        self.failed_over: LiveRequest | None = None

    def about(self, live: LiveRequest) -> "_BlameScope":
        """Return a context that blames this request for an exception raised within it. Of nested
        contexts, the innermost one counts."""
        return _BlameScope(self, live)

    def enqueue(self, live: LiveRequest, now_ms: int) -> None:
        """Put a request into its model's queue, or into the best class if it was placed before.
        Adds the requests that the queue must shed for it to `shed`."""
        queue = self.queues.of(live.request.model)
        self.requests.move(live, State.QUEUED)
        queue.demand.queued.add(now_ms, prompt_tokens=live.prompt_tokens)
        self.let_wait(live, now_ms)
        self.shed += queue.shed_unserved()

    def let_wait(self, live: LiveRequest, now_ms: int) -> None:
        """Put a request into its model's queue that is already counted as queued."""
        request = live.request
        queue = self.queues.of(request.model)
        prefill_ms = live.prompt_tokens * 1000 // ASSUMED_PREFILL_TOKENS_PER_S
        decode_ms = int(request.sampling.max_tokens * ASSUMED_STEP_MS)
        self.shed += queue.admission.arrive(
            live.request_id,
            tenant=request.tenant,
            level=0 if live.attempt.number else CLASSES[request.priority],
            tokens=live.prompt_tokens,
            work_ms=prefill_ms + decode_ms,
            deadline_ms=request.deadline_ms,
            since_ms=live.queued_ms,
            now_ms=now_ms,
        )

    def queue_length(self, model: str) -> int:
        """Return how many requests of a model wait for a placement."""
        return self.queues.of(model).waiting

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects = self.effects[:]
        self.effects.clear()
        return effects

    def forget_partition(self, partition: int) -> None:
        """Drop all entries of a partition except its live requests."""
        self.sessions.drop(partition)
        self.histories.drop(partition)
        self.ended_ids.forget_partition(partition)
        self.early_cancellations.forget_partition(partition)

    def sweep(self, now_ms: int) -> None:
        """Drop ended ids and early cancellations that are too old, and queues that are not used."""
        self.ended_ids.sweep(now_ms)
        self.early_cancellations.sweep(now_ms)
        self.queues.sweep(self.fleet.models)


class _BlameScope:
    """A context that notes its request as `failed_over` if its body raises."""

    __slots__ = ("_live", "_tables")

    def __init__(self, tables: RouterTables, live: LiveRequest) -> None:
        self._tables, self._live = tables, live

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and self._tables.failed_over is None:
            self._tables.failed_over = self._live
