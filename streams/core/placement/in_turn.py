"""Workers in turn, looking at no load: the policies `pairs` and `round_robin`.

`pairs` is static 1P1D: the first prefill worker with the first decode worker, in order of their
ids, the second with the second. A conversation gets the next pair, and keeps it. With `round_robin`
a request gets the next prefill worker, and a conversation the next decode worker, which it keeps.
Who has no room is passed over. `streams/core/placement/placer.py` asks only where such a policy
places; every turn is then remote, and no deadline is looked at.
"""

from schemas.records import MemberState, Role
from streams.core.fleet.workers import Life, Worker
from streams.core.placement.selection import View

PAIRS, ROUND_ROBIN = POLICIES = ("pairs", "round_robin")
Pair = tuple[Worker | None, Worker | None]  # prefill and decode worker


class InTurn:
    """Remembers per role who was the last to be given something; so it is bounded."""

    def __init__(self) -> None:
        self._last: dict[Role, str] = {}

    def pair(self, view: View, policy: str) -> Pair:
        """For a request now: no prefill worker while it has to wait, no decode worker while only
        that one has no room."""
        pairs = _pairs(view) if policy == PAIRS else []
        if not pairs:
            return self._next(Role.PREFILL, _open(view, Role.PREFILL)), self.decode(view)
        free = [pair for pair in pairs if pair[0].free]
        roomy = {decode.worker_id: (prefill, decode) for prefill, decode in free if decode.free}
        if view.home is not None and view.home.worker_id in roomy:
            return roomy[view.home.worker_id]
        decode = self._next(Role.DECODE, [decode for _, decode in roomy.values()])
        if decode is not None:
            return roomy[decode.worker_id]
        return self._next(Role.PREFILL, [prefill for prefill, _ in free]), None

    def decode(self, view: View) -> Worker | None:
        """The conversation's own decode worker, else the next one that has room."""
        if view.home_takes(Role.DECODE):
            return view.home
        return self._next(Role.DECODE, _open(view, Role.DECODE))

    def replica(self, view: View) -> Worker | None:
        """Likewise among replicas."""
        if view.home_takes(Role.REPLICA):
            return view.home
        return self._next(Role.REPLICA, _open(view, Role.REPLICA))

    def handoff(self, view: View, policy: str, prefill: Life, decode: Life) -> Worker | None:
        """Who decodes what that prefill worker has computed, and for whom it was placed; None
        while it has to wait."""
        if policy == PAIRS:
            partners = {first.life: second for first, second in _pairs(view)}
            partner = partners.get(prefill)
            if partner is not None:
                return partner if partner.free else None
        meant = next((each for each in _open(view, Role.DECODE) if each.life == decode), None)
        return meant or self.decode(view)

    def give(self, view: View, *workers: Worker | None) -> None:
        """These have the request: whoever comes next gets the next ones. Later turns of a
        conversation are nobody's turn but its prefill worker's."""
        for worker in workers:
            if worker is not None and worker is not view.home:
                self._last[worker.role] = worker.worker_id

    def _next(self, role: Role, workers: list[Worker]) -> Worker | None:
        """Of workers in order of their ids, the first behind the last."""
        last = self._last.get(role, "")
        behind = (worker for worker in workers if worker.worker_id > last)
        return next(behind, workers[0] if workers else None)


def _open(view: View, role: Role) -> list[Worker]:
    workers = view.fleet.pools[role].workers
    return [worker for worker in workers if worker.free and worker.lives(view.now_ms)]


def _pairs(view: View) -> list[tuple[Worker, Worker]]:
    """Those whose both workers live. Who has said goodbye is no partner; who is only silent is, so
    that a worker that is started again finds its own."""
    pools = (view.fleet.pools[role].workers for role in (Role.PREFILL, Role.DECODE))
    prefills, decodes = (
        [worker for worker in workers if worker.member.state is not MemberState.GONE]
        for workers in pools
    )
    return [
        (prefill, decode)
        for prefill, decode in zip(prefills, decodes, strict=False)
        if prefill.lives(view.now_ms) and decode.lives(view.now_ms)
    ]
