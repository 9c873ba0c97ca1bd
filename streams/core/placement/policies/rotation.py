"""Policies `pairs` and `round_robin`: workers in turn, whatever their load.

`pairs` is static 1P1D: the first prefill worker with the first decode worker, in order of their
ids, the second with the second. A session gets the next pair, and keeps it. With `round_robin` a
request gets the next prefill worker, and a session the next decode worker, which it keeps. Workers
without credit are skipped. `streams/core/placement/placer.py` calls this only for these policies;
every turn is then remote, and deadlines do not count.
"""

from collections.abc import Container
from typing import Protocol

from schemas.records import MemberState, Role
from streams.core.fleet.workers import Life, ModelPools, Worker
from streams.core.placement.policies.policy import Policy

Pair = tuple[Worker | None, Worker | None]  # prefill and decode worker


class PairsPolicy(Policy):
    """The first prefill worker with the first decode worker, the second with the second."""

    is_fixed = in_turn = fixed_pairs = True


class RoundRobinPolicy(Policy):
    """The next prefill worker for each request, the next decode worker for each session."""

    is_fixed = in_turn = True


class RequestView(Protocol):
    """A request among the workers of its model (`streams/core/placement/selection.py`)."""

    fleet: ModelPools
    now_ms: int
    home: Worker | None

    def takes(self, worker: Worker) -> bool:
        """Return whether a living worker takes the request."""

    def home_takes(self, role: Role) -> bool:
        """Return whether the session's worker has this role and takes the request."""


class WorkerRotation:
    """The order of the workers' turns; stores only the last worker of each role of a model.

    `RequestView.home` is the living worker that has the session's KV, if there is one.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, Role], str] = {}  # by model and role

    def pair(self, view: RequestView, *, fixed: bool) -> Pair:
        """Return the next pair for a request: one of the fixed pairs, or any two workers. Without a
        prefill worker the request has to wait; without a decode worker prefill can begin."""
        pairs = _pairs(view) if fixed else []
        if not pairs:
            prefill = self._next(Role.PREFILL, _open(view, Role.PREFILL))
            return prefill, self.next_worker(view, Role.DECODE)
        free = [pair for pair in pairs if view.takes(pair[0])]
        roomy = {decode.worker_id: (first, decode) for first, decode in free if view.takes(decode)}
        if view.home is not None and view.home.worker_id in roomy:
            return roomy[view.home.worker_id]
        decode = self._next(Role.DECODE, [decode for _, decode in roomy.values()])
        if decode is not None:
            return roomy[decode.worker_id]
        return self._next(Role.PREFILL, [prefill for prefill, _ in free]), None

    def next_worker(self, view: RequestView, role: Role) -> Worker | None:
        """Return the session's decode worker or replica, or else the next one with credit."""
        return view.home if view.home_takes(role) else self._next(role, _open(view, role))

    def handoff(
        self, view: RequestView, *, fixed: bool, prefill: Life, decode: Life
    ) -> Worker | None:
        """Return the decode worker for a prompt that `prefill` has computed and that was placed for
        `decode`; None while it has to wait."""
        if fixed:
            partners = {first.life: second for first, second in _pairs(view)}
            partner = partners.get(prefill)
            if partner is not None:
                return partner if view.takes(partner) else None
        able = _open(view, Role.DECODE)
        meant = next((worker for worker in able if worker.life == decode), None)
        return meant or self.next_worker(view, Role.DECODE)

    def record_turn(self, home: Worker | None, *workers: Worker | None) -> None:
        """Record that these workers have a request, so that the next request gets the next ones.
        A session's home does not use up its turn."""
        for worker in workers:
            if worker is not None and worker is not home:
                self._last[worker.model, worker.role] = worker.worker_id

    def forget_models(self, but: Container[str]) -> None:
        """Forget the turns of all models but those."""
        self._last = {pool: worker for pool, worker in self._last.items() if pool[0] in but}

    def _next(self, role: Role, workers: list[Worker]) -> Worker | None:
        """Return the first of these workers, in order of their ids, after the last one used."""
        last = self._last.get((workers[0].model, role), "") if workers else ""
        behind = (worker for worker in workers if worker.worker_id > last)
        return next(behind, workers[0] if workers else None)


def _open(view: RequestView, role: Role) -> list[Worker]:
    return [worker for worker in view.fleet.pools[role].workers if view.takes(worker)]


def _pairs(view: RequestView) -> list[tuple[Worker, Worker]]:
    """Return the pairs whose workers both live. A worker that has said goodbye has no partner; a
    silent one keeps its partner, so that it finds the same one after a restart."""
    pools = (view.fleet.pools[role].workers for role in (Role.PREFILL, Role.DECODE))
    prefills, decodes = (
        [worker for worker in workers if worker.member.state is not MemberState.GONE]
        for workers in pools
    )
    return [
        (prefill, decode)
        for prefill, decode in zip(prefills, decodes, strict=False)
        if prefill.is_alive(view.now_ms) and decode.is_alive(view.now_ms)
    ]
