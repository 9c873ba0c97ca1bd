"""Policies `pairs` and `round_robin`: workers in turn, whatever their load.

`pairs` is static 1P1D: the first prefill worker with the first decode worker, in order of their
ids, the second with the second. A session gets the next pair, and keeps it. With `round_robin` a
request gets the next prefill worker, and a session the next decode worker, which it keeps. Workers
without credit are skipped. `streams/core/placement/placer.py` calls this only for these policies;
every turn is then remote, and deadlines do not count.
"""

from schemas.records import MemberState, Role
from streams.core.fleet.workers import Fleet, Life, Worker
from streams.core.placement.policies.policy import Policy

Pair = tuple[Worker | None, Worker | None]  # prefill and decode worker


class PairsPolicy(Policy):
    """The first prefill worker with the first decode worker, the second with the second."""

    is_fixed = in_turn = fixed_pairs = True


class RoundRobinPolicy(Policy):
    """The next prefill worker for each request, the next decode worker for each session."""

    is_fixed = in_turn = True


class WorkerRotation:
    """The order of the workers' turns; stores only the last worker of each role.

    `home` is the living worker that has the session's KV, if there is one.
    """

    def __init__(self) -> None:
        self._last: dict[Role, str] = {}

    def pair(self, fleet: Fleet, home: Worker | None, now_ms: int, *, fixed: bool) -> Pair:
        """Return the next pair for a request: one of the fixed pairs, or any two workers. Without a
        prefill worker the request has to wait; without a decode worker prefill can begin."""
        pairs = _pairs(fleet, now_ms) if fixed else []
        if not pairs:
            prefill = self._next(Role.PREFILL, _open(fleet, Role.PREFILL, now_ms))
            return prefill, self.next_worker(fleet, home, now_ms, Role.DECODE)
        free = [pair for pair in pairs if pair[0].free]
        roomy = {decode.worker_id: (prefill, decode) for prefill, decode in free if decode.free}
        if home is not None and home.worker_id in roomy:
            return roomy[home.worker_id]
        decode = self._next(Role.DECODE, [decode for _, decode in roomy.values()])
        if decode is not None:
            return roomy[decode.worker_id]
        return self._next(Role.PREFILL, [prefill for prefill, _ in free]), None

    def next_worker(
        self, fleet: Fleet, home: Worker | None, now_ms: int, role: Role
    ) -> Worker | None:
        """Return the session's decode worker or replica, or else the next one with credit."""
        if home is not None and home.role is role and home.free:
            return home
        return self._next(role, _open(fleet, role, now_ms))

    def handoff(
        self,
        fleet: Fleet,
        home: Worker | None,
        now_ms: int,
        *,
        fixed: bool,
        prefill: Life,
        decode: Life,
    ) -> Worker | None:
        """Return the decode worker for a prompt that `prefill` has computed and that was placed for
        `decode`; None while it has to wait."""
        if fixed:
            partners = {first.life: second for first, second in _pairs(fleet, now_ms)}
            partner = partners.get(prefill)
            if partner is not None:
                return partner if partner.free else None
        able = _open(fleet, Role.DECODE, now_ms)
        meant = next((worker for worker in able if worker.life == decode), None)
        return meant or self.next_worker(fleet, home, now_ms, Role.DECODE)

    def record_turn(self, home: Worker | None, *workers: Worker | None) -> None:
        """Record that these workers have a request, so that the next request gets the next ones.
        A session's home does not use up its turn."""
        for worker in workers:
            if worker is not None and worker is not home:
                self._last[worker.role] = worker.worker_id

    def _next(self, role: Role, workers: list[Worker]) -> Worker | None:
        """Return the first of these workers, in order of their ids, after the last one used."""
        last = self._last.get(role, "")
        behind = (worker for worker in workers if worker.worker_id > last)
        return next(behind, workers[0] if workers else None)


def _open(fleet: Fleet, role: Role, now_ms: int) -> list[Worker]:
    workers = fleet.pools[role].workers
    return [worker for worker in workers if worker.free and worker.is_alive(now_ms)]


def _pairs(fleet: Fleet, now_ms: int) -> list[tuple[Worker, Worker]]:
    """Return the pairs whose workers both live. A worker that has said goodbye has no partner; a
    silent one keeps its partner, so that it finds the same one after a restart."""
    pools = (fleet.pools[role].workers for role in (Role.PREFILL, Role.DECODE))
    prefills, decodes = (
        [worker for worker in workers if worker.member.state is not MemberState.GONE]
        for workers in pools
    )
    return [
        (prefill, decode)
        for prefill, decode in zip(prefills, decodes, strict=False)
        if prefill.is_alive(now_ms) and decode.is_alive(now_ms)
    ]
