"""A router's table of workers: which ones take work now, their free credits and their load.

`Fleet` folds fleet records through `schemas/fleet.py` and counts what this router has dispatched.
A worker appears once per role in the pools of its model, with its active answers. Pools and answers
are columns of numbers, in order of worker ids, which `streams/core/placement` reads;
`streams/core/handlers/orders.py` updates the counts. Decides nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.fleet import CLOCK_MARGIN_MS, DEAF_MS, LEASE_MS, FleetView, Member
from schemas.records import Capability, Heartbeat, MemberKind, MemberState, Registration, Role
from schemas.topics import WORK_TOPICS

Life = tuple[str, int]  # worker id and epoch
Gateway = tuple[str, int]  # a gateway process: its member id and `started_ms`
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
NOT_LISTED = -1
DECODERS = (Role.DECODE, Role.REPLICA)  # a worker with one of these roles ends the request
FORGET_MS = 600_000
LOADING_MS = 5_000  # a worker that was sent an adapter reports it as loaded within this time
_NEVER_MS = -(1 << 60)
_ANSWERS_MIN = 8  # rows of a worker


class ActiveAnswer(NamedTuple):
    """An answer that a worker generates for this router."""

    request_id: str
    prompt_tokens: int
    max_tokens: int  # still to generate when it was dispatched
    deadline_ms: int
    begins_ms: int  # when its first token is expected there


class ActiveAnswers:
    """The active answers of a decode or replica worker, one row for each.

    Each placement computes which of a worker's answers would miss their deadlines; a loop over
    them took a third of a router's CPU at 256 streams. When a row is removed, the last row takes
    its place.
    """

    def __init__(self) -> None:
        self._answers: list[ActiveAnswer] = []
        self._rows: dict[str, int] = {}  # by request id
        self._columns = np.zeros((3, _ANSWERS_MIN))

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: ActiveAnswer) -> None:
        """Add the answer of a request that has none here."""
        row = len(self._answers)
        if row == self._columns.shape[1]:
            self._columns = np.hstack((self._columns, np.zeros_like(self._columns)))
        self._columns[:, row] = answer.max_tokens, answer.deadline_ms, answer.begins_ms
        self._answers.append(answer)
        self._rows[answer.request_id] = row

    def remove(self, request_id: str) -> ActiveAnswer | None:
        """Remove and return the request's answer, if it has one."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        answer, last = self._answers[row], self._answers.pop()
        if last is not answer:
            self._answers[row], self._rows[last.request_id] = last, row
            self._columns[:, row] = self._columns[:, len(self._answers)]
        return answer

    @property
    def max_tokens(self) -> Numbers:
        """Return each answer's tokens still to generate when it was dispatched."""
        return self._column(0)

    @property
    def deadline_ms(self) -> Numbers:
        """Return the deadline of each answer."""
        return self._column(1)

    @property
    def begins_ms(self) -> Numbers:
        """Return when each answer's first token is expected."""
        return self._column(2)

    def _column(self, column: int) -> Numbers:
        values: Numbers = self._columns[column, : len(self._answers)]
        return values


@dataclass(slots=True, eq=False)
class Worker:
    """One worker in one role, with this router's requests on it."""

    worker_id: str
    epoch: int
    role: Role
    model: str
    topic: str
    partition: int
    member: Member
    window: int = 0  # granted: most requests of this router at once
    running: int = 0  # requests of this router
    work_ahead_tokens: int = 0  # prompt tokens of this router that are not computed yet
    others_running: int = 0  # requests of other routers, as of the last heartbeat
    others_tokens: int = 0
    answers: ActiveAnswers = field(default_factory=ActiveAnswers)  # of this router
    context_tokens: int = 0  # prompt tokens of these answers
    others_context_tokens: int = 0  # KV of other routers' requests, as of the last heartbeat
    capacity_tokens: float = inf  # KV that fits into its memory; inf if unknown
    paused: bool = False  # it refused work; no more until its next heartbeat
    busy_until_ms: float = 0.0  # when the prompts dispatched to it are expected to be computed
    append_ms_per_token: float = 0.0  # expected when it got its last prompt
    pace: float = 1.0  # its measured time for the same work, divided by its pool's
    appended_tokens: float = 0.0  # total prompt tokens placed on it beside its batch
    token_rate: float = 0.0  # prompt tokens placed on it per ms, averaged, as of `rates_at_ms`
    prompt_rate: float = 0.0  # prompts, likewise
    rates_at_ms: int = 0
    last_dispatch: int = 0  # number of its last request, among all that this router dispatched
    # LoRA adapters that are loaded there, or will be, with the time of this router's last dispatch
    adapters: dict[str, int] = field(default_factory=dict)
    row: int = NOT_LISTED  # its place in the pool's columns
    life: Life = field(init=False)

    def __post_init__(self) -> None:
        self.life = self.worker_id, self.epoch

    @property
    def capability(self) -> Capability | None:
        return self.member.registration.capability

    @property
    def requests(self) -> int:
        """Return how many requests it has, of all routers."""
        return self.running + self.others_running

    @property
    def batch_tokens(self) -> int:
        """Return the context tokens that each of its steps reads, of all routers' requests."""
        return self.context_tokens + self.others_context_tokens

    def waiting_ms(self, now_ms: int) -> float:
        """Return how long the prompts dispatched to it are still expected to take, in ms."""
        return max(0.0, self.busy_until_ms - now_ms)

    def waiting_tokens(self, now_ms: int) -> float:
        """Return the tokens of these prompts that it is expected not to have computed yet."""
        per_token_ms = self.append_ms_per_token
        return self.waiting_ms(now_ms) / per_token_ms if per_token_ms else 0.0

    @property
    def free(self) -> int:
        """Return how many more requests it takes from this router, if it lives."""
        return 0 if self.paused else max(0, self.window - self.running)

    def can_load(self, adapter: str) -> bool:
        """Return whether it can load a LoRA adapter."""
        return self.capability is not None and adapter in self.capability.adapters

    def keeps_time_with(self, peer: Member) -> bool:
        """Return whether the two hosts' clocks agree well enough to move KV between them."""
        return abs(self.member.ahead_ms - peer.ahead_ms) <= CLOCK_MARGIN_MS

    def is_alive(self, now_ms: int) -> bool:
        """Return whether it is ready and has reported within its lease."""
        member = self.member
        return now_ms - member.seen_ms <= LEASE_MS and member.state is MemberState.READY


class WorkerPool:
    """The workers of one role; columns of equal length, one row per worker.

    Columns instead of a loop over workers keep a choice among 200 workers within its time limit
    (`make bench-decisions`).
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        self.by_id = {worker.worker_id: worker for worker in self.workers}
        rows = len(self.workers)
        self.seen_ms = np.full(rows, _NEVER_MS, np.int64)  # of the last report, if ready
        self.free = np.zeros(rows, np.int64)  # credits, if it lives
        self.requests = np.zeros(rows)  # of all routers
        self.tokens = np.zeros(rows)  # prompt tokens not computed yet, of all routers
        self.others_tokens = np.zeros(rows)  # likewise, of other routers
        self.batch_tokens = np.zeros(rows)
        self.capacity_tokens = np.full(rows, inf)
        self.busy_until_ms = np.zeros(rows)
        self.pace = np.ones(rows)
        self.last_dispatch = np.zeros(rows)  # number of a row's last request
        self._living: Flags = np.zeros(rows, np.bool_)
        self._living_at_ms: int | None = None  # None if a row has changed since
        for row, worker in enumerate(self.workers):
            worker.row = row
            self.update(worker)

    def update(self, worker: Worker) -> None:
        """Update a worker's row, if it has one."""
        row = worker.row
        if row == NOT_LISTED:
            return
        self._living_at_ms = None
        member = worker.member
        ready = member.state is MemberState.READY
        self.seen_ms[row] = member.seen_ms if ready else _NEVER_MS
        self.free[row] = worker.free
        self.requests[row] = worker.requests
        self.tokens[row] = worker.work_ahead_tokens + worker.others_tokens
        self.others_tokens[row] = worker.others_tokens
        self.batch_tokens[row] = worker.batch_tokens
        self.capacity_tokens[row] = worker.capacity_tokens
        self.busy_until_ms[row] = worker.busy_until_ms
        self.pace[row] = worker.pace
        self.last_dispatch[row] = worker.last_dispatch

    def living(self, now_ms: int) -> Flags:
        """Return which rows are ready and have reported within their lease; do not write to it.

        Cached per `now_ms`, because a placement calls it several times (`make bench-decisions`).
        """
        if now_ms != self._living_at_ms:
            self._living = self.seen_ms >= now_ms - LEASE_MS
            self._living_at_ms = now_ms
        return self._living

    def living_count(self, now_ms: int) -> int:
        """Return how many rows are ready and have reported within their lease."""
        return int(np.count_nonzero(self.living(now_ms)))

    def living_requests(self, now_ms: int) -> float:
        """Return the requests of all living rows, of all routers."""
        return float(self.requests @ self.living(now_ms))

    def open(self, now_ms: int) -> Flags:
        """Return which rows take one more request."""
        return (self.free > 0) & self.living(now_ms)

    def waiting_ms(self, now_ms: int) -> Numbers:
        """Return how long each row's prompts are still expected to take, in ms."""
        return np.maximum(self.busy_until_ms - now_ms, 0.0)

    def credits(self, now_ms: int) -> int:
        """Return the credits of all living rows."""
        return int(self.free @ self.living(now_ms))


class ModelPools:
    """The workers of one model by role, in order of their ids."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.pools: dict[Role, WorkerPool] = {role: WorkerPool() for role in WORK_TOPICS}
        self._prefill_ms: int | None = None

    def __bool__(self) -> bool:
        """Return whether a worker is listed in any of the pools."""
        return any(pool.workers for pool in self.pools.values())

    def worker(self, worker_id: str, role: Role) -> Worker | None:
        """Return the listed worker with this id and role, living or not; None if there is none."""
        return self.pools[role].by_id.get(worker_id)

    def has_living(self, role: Role, now_ms: int, adapter: str = "") -> bool:
        """Return whether a worker of the role lives that can load the adapter, if one is named;
        with or without credits."""
        pool = self.pools[role]
        if not adapter:
            return pool.living_count(now_ms) > 0
        return any(worker.can_load(adapter) and worker.is_alive(now_ms) for worker in pool.workers)

    def can_end(self, now_ms: int, adapter: str = "") -> bool:
        """Return whether a worker lives that can generate answers with the adapter, if one is
        named; with or without credits."""
        return any(self.has_living(role, now_ms, adapter) for role in DECODERS)

    def prefill_absent_ms(self, now_ms: int) -> float:
        """Return for how many ms no prefill worker has lived; 0 while one lives. If none is in the
        pool, at a start or after the last one got another role, return `inf`: requests do not wait
        for one."""
        if self._prefill_ms is None or self.has_living(Role.PREFILL, now_ms):
            self._prefill_ms = now_ms
        return now_ms - self._prefill_ms if self.pools[Role.PREFILL].workers else inf

    def occupy(self, worker: Worker, until_ms: float, append_ms_per_token: float) -> None:
        """Store until when the prompts dispatched to a decode or replica worker keep it busy.

        Heartbeats extend that if more prompt tokens are queued than was expected.
        """
        worker.busy_until_ms, worker.append_ms_per_token = until_ms, append_ms_per_token
        self.pools[worker.role].update(worker)

    def set_pace(self, life: Life, role: Role, pace: float) -> None:
        """Store a worker's time for the same work, divided by its pool's average."""
        worker = self.worker(life[0], role)
        if worker is not None and worker.epoch == life[1]:
            worker.pace = pace
            self.pools[role].update(worker)

    def list_worker(self, worker: Worker) -> None:
        """Add a worker to the pool of its role, in the place of an earlier one with its id."""
        self._replace(worker.role, worker.worker_id, [worker])

    def delist(self, worker_id: str, role: Role) -> None:
        """Remove a worker from the pool of a role, if it is there."""
        if worker_id in self.pools[role].by_id:
            self._replace(role, worker_id, [])

    def _replace(self, role: Role, worker_id: str, replacements: list[Worker]) -> None:
        listed = self.pools[role].workers
        for worker in listed:
            worker.row = NOT_LISTED
        rest = [worker for worker in listed if worker.worker_id != worker_id]
        self.pools[role] = WorkerPool([*rest, *replacements])


class Fleet:
    """All workers, by model and role."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.view = FleetView()
        self.models: dict[str, ModelPools] = {}
        self._no_pools = ModelPools("")  # of models that no worker serves
        self._workers: dict[tuple[str, Role], Worker] = {}
        self._heard_ms = 0
        self._hearing_since_ms = 0
        self._dispatch_count = 0  # requests that were dispatched

    def apply(
        self, record: Registration | Heartbeat, offset: int, now_ms: int, ahead_ms: int = 0
    ) -> None:
        """Fold one record of the fleet topic."""
        if now_ms - self._heard_ms > DEAF_MS:
            self._hearing_since_ms = now_ms
        self._heard_ms = now_ms
        self.view.apply(record, offset, now_ms)
        member = self.view.members.get(record.member_id)
        if member is not None and member.epoch == record.epoch:
            member.ahead_ms = ahead_ms
        if isinstance(record, Heartbeat):
            self._beat(record, now_ms)
        elif record.kind is MemberKind.WORKER:
            self._register(record.member_id)

    def worker(self, worker_id: str, role: Role) -> Worker | None:
        """Return a worker in a role, living or not; None if it is unknown."""
        return self._workers.get((worker_id, role))

    def of(self, model: str) -> ModelPools:
        """Return the pools of a model; empty ones if no worker serves it."""
        return self.models.get(model, self._no_pools)

    def is_lost(self, life: Life, now_ms: int) -> bool:
        """Return whether this worker incarnation is lost, so that its requests are placed again.

        Silence counts only while this router reads other members' records; after it has read none
        for `DEAF_MS`, each member has a whole lease to report again. A goodbye is no loss: a worker
        leaves without requests, and this router may read its last outcomes later, on another topic.
        """
        member = self.view.members.get(life[0])
        if member is None or member.epoch != life[1]:
            return True
        if now_ms - self._heard_ms > DEAF_MS:
            return False
        return now_ms - max(member.seen_ms, self._hearing_since_ms) > LEASE_MS

    def has_gateway(self, gateway: Gateway, now_ms: int) -> bool:
        """Return whether that gateway process lives, in any epoch. It counts as living while this
        router reads no fleet records, and for a lease after that."""
        member = self.view.members.get(gateway[0])
        if now_ms - self._heard_ms > DEAF_MS:
            return True
        if member is None or member.registration.started_ms != gateway[1]:
            return False
        silent_ms = now_ms - max(member.seen_ms, self._hearing_since_ms)
        return member.state is not MemberState.GONE and silent_ms <= LEASE_MS

    def add_request(
        self,
        worker: Worker,
        tokens: int,
        answer: ActiveAnswer | None = None,
        *,
        adapter: str = "",
        now_ms: int = 0,
    ) -> None:
        """Count a dispatched request, and the answer that the worker will generate. The worker will
        load the `adapter`, if the request has one."""
        self._dispatch_count += 1
        if adapter:
            worker.adapters[adapter] = now_ms
        worker.last_dispatch = self._dispatch_count
        worker.running += 1
        worker.work_ahead_tokens += tokens
        if answer is not None:
            worker.answers.add(answer)
            worker.context_tokens += answer.prompt_tokens
        self._update(worker)

    def release(self, life: Life, role: Role, tokens: int, request_id: str = "") -> None:
        """Uncount a request that left; do nothing for earlier incarnations."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.running -= 1
            worker.work_ahead_tokens -= tokens
            answer = worker.answers.remove(request_id)
            worker.context_tokens -= 0 if answer is None else answer.prompt_tokens
            self._update(worker)

    def pause(self, life: Life, role: Role) -> None:
        """Stop dispatching to a worker that refused work, until its next heartbeat."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.paused = True
            self._update(worker)

    def _update(self, worker: Worker) -> None:
        self.of(worker.model).pools[worker.role].update(worker)

    def forget(self, now_ms: int) -> list[str]:
        """Drop members that have been silent for `FORGET_MS`, which bounds the tables; return their
        ids."""
        forgotten_ids = self.view.forget(FORGET_MS, now_ms)
        for member_id in forgotten_ids:
            for role in WORK_TOPICS:
                if (worker := self._workers.get((member_id, role))) is not None:
                    self._drop(worker)
        self.models = {model: pools for model, pools in self.models.items() if pools}
        return forgotten_ids

    def _beat(self, record: Heartbeat, now_ms: int) -> None:
        member = self.view.members.get(record.member_id)
        if member is None or member.beat_seq != record.seq or member.epoch != record.epoch:
            return  # unknown, stale or repeated
        load = member.load
        for role in member.registration.roles:
            worker = self._workers.get((record.member_id, role))
            if worker is not None:
                worker.window = member.credits.get((self.router_id, role), 0)
                worker.paused = False
                worker.others_running = max(0, load.running + load.waiting - worker.running)
                worker.others_tokens = max(0, load.queued_tokens - worker.work_ahead_tokens)
                block_size = _block_size(member.registration.capability)
                used_tokens = load.kv_blocks_used * block_size
                worker.others_context_tokens = max(0, used_tokens - worker.context_tokens)
                worker.capacity_tokens = load.kv_blocks_total * block_size or inf
                own_tokens = load.queued_tokens - worker.others_tokens
                queued_ms = own_tokens * worker.append_ms_per_token
                worker.busy_until_ms = max(worker.busy_until_ms, now_ms + queued_ms)
                dispatched = worker.adapters.items()
                loading = {name: ms for name, ms in dispatched if now_ms - ms < LOADING_MS}
                worker.adapters = dict.fromkeys(load.adapters, _NEVER_MS) | loading
                self._update(worker)

    def _register(self, member_id: str) -> None:
        """Update a worker's rows from the view; keep the counts unless its epoch changed.

        A role that a worker gives up gets no new work; its counts stay until the epoch changes.
        """
        member = self.view.members[member_id]
        capability = member.registration.capability
        model = "" if capability is None else capability.model
        leases = {lease.topic: lease.partition for lease in member.registration.leases}
        for role, topic in WORK_TOPICS.items():
            worker = self._workers.get((member_id, role))
            if worker is not None and (worker.epoch != member.epoch or worker.model != model):
                self._drop(worker)
                worker = None
            if role in member.registration.roles and topic in leases:
                worker = worker or Worker(member_id, member.epoch, role, model, topic, 0, member)
                worker.partition, worker.member = leases[topic], member
                self._workers[member_id, role] = worker
                self.models.setdefault(model, ModelPools(model)).list_worker(worker)
            elif worker is not None:
                self.of(model).delist(member_id, role)

    def _drop(self, worker: Worker) -> None:
        del self._workers[worker.worker_id, worker.role]
        self.of(worker.model).delist(worker.worker_id, worker.role)


def _block_size(capability: Capability | None) -> int:
    return 0 if capability is None else capability.block_size
