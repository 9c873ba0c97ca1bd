"""Workers in turn, looking at no load: the policies `pairs` and `round_robin`.

`pairs` is static 1P1D: the first prefill worker with the first decode worker, in order of their
ids, the second with the second. A conversation gets the next pair, and keeps it. With `round_robin`
a request gets the next prefill worker, and a conversation the next decode worker, which it keeps.
Who has no room is passed over. `streams/core/placement/placer.py` asks only where such a policy
places; every turn is then remote, and no deadline is looked at.
"""

from schemas.records import MemberState, Role
from streams.core.fleet.members import Fleet
from streams.core.fleet.workers import Life, Worker

Pair = tuple[Worker | None, Worker | None]  # prefill and decode worker


class WorkerRotation:
    """Remembers per role who was the last to be given something; so it is bounded.

    `home` is the living worker that holds the conversation's KV, if there is one.
    """

    def __init__(self) -> None:
        self._last: dict[Role, str] = {}

    def pair(self, fleet: Fleet, home: Worker | None, now_ms: int, *, fixed: bool) -> Pair:
        """For a request now, of the fixed pairs or of any two: no prefill worker while it has to
        wait, no decode worker while only that one has no room."""
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
        """The conversation's own decode worker or replica, else the next one that has room."""
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
        """Who decodes what that prefill worker has computed, and for whom it was placed; None
        while it has to wait."""
        if fixed:
            partners = {first.life: second for first, second in _pairs(fleet, now_ms)}
            partner = partners.get(prefill)
            if partner is not None:
                return partner if partner.free else None
        able = _open(fleet, Role.DECODE, now_ms)
        meant = next((worker for worker in able if worker.life == decode), None)
        return meant or self.next_worker(fleet, home, now_ms, Role.DECODE)

    def record_turn(self, home: Worker | None, *workers: Worker | None) -> None:
        """These have the request: whoever comes next gets the next ones. Later turns of a
        conversation are nobody's turn but its prefill worker's."""
        for worker in workers:
            if worker is not None and worker is not home:
                self._last[worker.role] = worker.worker_id

    def _next(self, role: Role, workers: list[Worker]) -> Worker | None:
        """Of workers in order of their ids, the first behind the last."""
        last = self._last.get(role, "")
        behind = (worker for worker in workers if worker.worker_id > last)
        return next(behind, workers[0] if workers else None)


def _open(fleet: Fleet, role: Role, now_ms: int) -> list[Worker]:
    workers = fleet.pools[role].workers
    return [worker for worker in workers if worker.free and worker.is_alive(now_ms)]


def _pairs(fleet: Fleet, now_ms: int) -> list[tuple[Worker, Worker]]:
    """Those whose both workers live. Who has said goodbye is no partner; who is only silent is, so
    that a worker that is started again finds its own."""
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
