"""A router's table of workers: which ones take work now, their free credits and their load.

Folds fleet records through `schemas/fleet.py` and counts what this router has dispatched. A worker
appears once per role. Decides nothing; `streams/core/placement/placer.py` chooses among the
workers, `streams/core/handlers/orders.py` updates the counts.
"""

from math import inf

from schemas.fleet import DEAF_MS, LEASE_MS, FleetView
from schemas.records import Capability, Heartbeat, MemberKind, MemberState, Registration, Role
from schemas.topics import WORK_TOPICS
from streams.core.fleet.workers import NOT_LISTED, ActiveAnswer, Gateway, Life, Worker, WorkerPool

FORGET_MS = 600_000


class Fleet:
    """All workers by role, in order of their ids."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.view = FleetView()
        self.pools: dict[Role, WorkerPool] = {role: WorkerPool() for role in WORK_TOPICS}
        self._workers: dict[tuple[str, Role], Worker] = {}
        self._heard_ms = 0
        self._hearing_since_ms = 0
        self._prefill_ms: int | None = None
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

    def has_living(self, role: Role, now_ms: int) -> bool:
        """Return whether a worker of the role lives, with or without credits."""
        return self.pools[role].living_count(now_ms) > 0

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

    def prefill_absent_ms(self, now_ms: int) -> int:
        """Return for how many ms no prefill worker has lived; 0 while one lives. If none is in the
        pool, at a start or after the last one got another role, return `now_ms`: requests do not
        wait for one."""
        if self._prefill_ms is None or self.has_living(Role.PREFILL, now_ms):
            self._prefill_ms = now_ms
        return now_ms - self._prefill_ms if self.pools[Role.PREFILL].workers else now_ms

    def add_request(self, worker: Worker, tokens: int, answer: ActiveAnswer | None = None) -> None:
        """Count a dispatched request, and the answer that the worker will generate."""
        self._dispatch_count += 1
        worker.last_dispatch = self._dispatch_count
        worker.running += 1
        worker.work_ahead_tokens += tokens
        if answer is not None:
            worker.answers.add(answer)
            worker.context_tokens += answer.prompt_tokens
        self.pools[worker.role].update(worker)

    def release(self, life: Life, role: Role, tokens: int, request_id: str = "") -> None:
        """Uncount a request that left; do nothing for earlier incarnations."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.running -= 1
            worker.work_ahead_tokens -= tokens
            answer = worker.answers.remove(request_id)
            worker.context_tokens -= 0 if answer is None else answer.prompt_tokens
            self.pools[role].update(worker)

    def pause(self, life: Life, role: Role) -> None:
        """Stop dispatching to a worker that refused work, until its next heartbeat."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.paused = True
            self.pools[role].update(worker)

    def occupy(self, worker: Worker, until_ms: float, append_ms_per_token: float) -> None:
        """Store until when the prompts dispatched to a decode or replica worker keep it busy.

        Heartbeats extend that if more prompt tokens are queued than was expected.
        """
        worker.busy_until_ms, worker.append_ms_per_token = until_ms, append_ms_per_token
        self.pools[worker.role].update(worker)

    def set_pace(self, life: Life, role: Role, pace: float) -> None:
        """Store a worker's time for the same work, divided by its pool's average."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.pace = pace
            self.pools[role].update(worker)

    def forget(self, now_ms: int) -> list[str]:
        """Drop members that have been silent for `FORGET_MS`, which bounds the tables; return their
        ids."""
        forgotten_ids = self.view.forget(FORGET_MS, now_ms)
        for member_id in forgotten_ids:
            self._drop(member_id)
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
                self.pools[role].update(worker)

    def _register(self, member_id: str) -> None:
        """Update a worker's rows from the view; keep the counts unless its epoch changed.

        A role that a worker gives up gets no new work; its counts stay until the epoch changes.
        """
        member = self.view.members[member_id]
        leases = {lease.topic: lease.partition for lease in member.registration.leases}
        for role, topic in WORK_TOPICS.items():
            old_worker = self._workers.get((member_id, role))
            if old_worker is not None and old_worker.epoch != member.epoch:
                del self._workers[member_id, role]
                old_worker = None
            takes = role in member.registration.roles and topic in leases
            if takes:
                worker = old_worker or Worker(member_id, member.epoch, role, topic, 0, member)
                worker.partition, worker.member = leases[topic], member
                self._workers[member_id, role] = worker
            self._list(member_id, role, takes)

    def _list(self, member_id: str, role: Role, takes: bool) -> None:
        listed = self.pools[role].workers
        workers = [worker for worker in listed if worker.worker_id != member_id]
        if not takes and len(workers) == len(listed):
            return  # it was not in this pool, and still is not
        for worker in listed:
            worker.row = NOT_LISTED
        if takes:
            workers.append(self._workers[member_id, role])
        self.pools[role] = WorkerPool(workers)

    def _drop(self, member_id: str) -> None:
        for role in WORK_TOPICS:
            if self._workers.pop((member_id, role), None) is not None:
                self._list(member_id, role, takes=False)


def _block_size(capability: Capability | None) -> int:
    return 0 if capability is None else capability.block_size
