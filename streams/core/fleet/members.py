"""What the router knows of workers: who takes work now, with how many credits left and how much
work ahead.

Folds fleet records through `schemas/fleet.py` and counts what this router has given out. A worker
appears once per role. Decides nothing; `streams/core/placement/placer.py` chooses among the
workers, `streams/core/router.py` keeps the counts.
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
        self._dispatch_count = 0  # requests that were given out

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
        """A worker in a role, whether it lives or not."""
        return self._workers.get((worker_id, role))

    def has_living(self, role: Role, now_ms: int) -> bool:
        """Whether a worker of the role lives, credits or not."""
        return self.pools[role].living_count(now_ms) > 0

    def is_lost(self, life: Life, now_ms: int) -> bool:
        """Whether what this life of a worker held must be placed again.

        Silence counts only while others are heard; after deafness everybody has a whole lease to
        be heard again. A goodbye is no loss: a worker leaves when it holds nothing, and its last
        outcomes may reach this router, over another topic, after it.
        """
        member = self.view.members.get(life[0])
        if member is None or member.epoch != life[1]:
            return True
        if now_ms - self._heard_ms > DEAF_MS:
            return False
        return now_ms - max(member.seen_ms, self._hearing_since_ms) > LEASE_MS

    def has_gateway(self, gateway: Gateway, now_ms: int) -> bool:
        """Whether that process of a gateway lives, in whichever epoch; while nobody is heard, and
        a lease after that, it is thought to."""
        member = self.view.members.get(gateway[0])
        if now_ms - self._heard_ms > DEAF_MS:
            return True
        if member is None or member.registration.started_ms != gateway[1]:
            return False
        silent_ms = now_ms - max(member.seen_ms, self._hearing_since_ms)
        return member.state is not MemberState.GONE and silent_ms <= LEASE_MS

    def prefill_absent_ms(self, now_ms: int) -> int:
        """For how long no prefill worker has lived; 0 while one does, and since ever where none is
        known, as at a start, or where the last one was given another role: then none is to be
        waited for."""
        if self._prefill_ms is None or self.has_living(Role.PREFILL, now_ms):
            self._prefill_ms = now_ms
        return now_ms - self._prefill_ms if self.pools[Role.PREFILL].workers else now_ms

    def add_request(self, worker: Worker, tokens: int, answer: ActiveAnswer | None = None) -> None:
        """Count a request that was dispatched, and the answer that the worker has to give."""
        self._dispatch_count += 1
        worker.last_dispatch = self._dispatch_count
        worker.running += 1
        worker.work_ahead_tokens += tokens
        if answer is not None:
            worker.answers.add(answer)
            worker.context_tokens += answer.prompt_tokens
        self.pools[worker.role].update(worker)

    def release(self, life: Life, role: Role, tokens: int, request_id: str = "") -> None:
        """Count a request that left; earlier lives hold nothing."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.running -= 1
            worker.work_ahead_tokens -= tokens
            answer = worker.answers.remove(request_id)
            worker.context_tokens -= 0 if answer is None else answer.prompt_tokens
            self.pools[role].update(worker)

    def pause(self, life: Life, role: Role) -> None:
        """The worker refused work: it gets no more until its next heartbeat."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.paused = True
            self.pools[role].update(worker)

    def occupy(self, worker: Worker, until_ms: float, append_ms_per_token: float) -> None:
        """Note until when the prompts dispatched to a decode or replica worker keep it busy.

        Heartbeats prolong that where more is queued than was expected.
        """
        worker.busy_until_ms, worker.append_ms_per_token = until_ms, append_ms_per_token
        self.pools[worker.role].update(worker)

    def set_pace(self, life: Life, role: Role, pace: float) -> None:
        """Note how long the worker takes for the same work, over its pool's average."""
        worker = self._workers.get((life[0], role))
        if worker is not None and worker.epoch == life[1]:
            worker.pace = pace
            self.pools[role].update(worker)

    def forget(self, now_ms: int) -> list[str]:
        """Drop members that have been silent for long, so that the tables stay bounded; returns
        their ids."""
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
        """Bring the table up to date with the view, keeping the counts of a life that goes on.

        A role that a worker gives up takes no new work; its counts stay until its life ends.
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
            return  # it had no part in this pool, and has none
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
