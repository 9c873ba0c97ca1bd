"""Lends the decode role to a prefill worker while no worker of its model that decodes lives.

Without living decode or replica workers no request of a model could end. So a prefill worker gets
the decode role besides its own until another worker decodes. The first of the living routers orders
that, one worker at a time; the others see it in the fleet. That router keeps the former roles only
in memory: if it dies, the worker keeps both roles until an operator changes them.

The other pools need no such help: without prefill workers decode workers compute prompts, and
without a retrieval pool answers report that. `streams/core/router.py` calls `check` once a second.
"""

from schemas.records import AssignRoles, MemberKind, Role
from streams.core.effects import LendRole
from streams.core.fleet.workers import DECODERS, Fleet, Life, ModelPools, Worker


class RoleLending:
    """Lends the decode role to prefill workers; never with `after_ms` 0."""

    def __init__(self, fleet: Fleet, after_ms: int) -> None:
        self._fleet, self._after_ms = fleet, after_ms
        self._since_ms: int | None = None  # since when there has been an order to give
        self._former_roles: dict[Life, tuple[Role, ...]] = {}  # of workers that were lent the role

    def check(self, now_ms: int) -> list[LendRole]:
        """Return the order to lend the role or take it back, once due for `after_ms`."""
        for life in [life for life in self._former_roles if self._fleet.is_lost(life, now_ms)]:
            del self._former_roles[life]
        order = self._order(now_ms) if self._is_first(now_ms) else None
        if order is None or not self._after_ms:
            self._since_ms = None
        elif self._since_ms is None:
            self._since_ms = now_ms
        elif now_ms - self._since_ms >= self._after_ms:
            self._since_ms = None
            return [self._give(*order, now_ms)]
        return []

    def _is_first(self, now_ms: int) -> bool:
        routers = self._fleet.view.living(MemberKind.ROUTER, now_ms)
        return next((router.member_id for router in routers), "") == self._fleet.router_id

    def _order(self, now_ms: int) -> tuple[Worker, tuple[Role, ...]] | None:
        """Return the worker of the first model that needs an order, with its new roles."""
        models = [self._fleet.models[model] for model in sorted(self._fleet.models)]
        orders = (self._needed(pools, now_ms) or self._spare(pools, now_ms) for pools in models)
        return next(filter(None, orders), None)

    def _needed(self, pools: ModelPools, now_ms: int) -> tuple[Worker, tuple[Role, ...]] | None:
        """Return a worker that could decode, with its roles, if all decoding workers are lost.
        Return None if an operator gave them other roles."""
        has_decoders = any(pools.pools[role].workers for role in DECODERS)
        if not has_decoders or pools.can_end(now_ms):
            return None
        able = [
            worker
            for worker in pools.pools[Role.PREFILL].workers
            if worker.is_alive(now_ms)
            and worker.life not in self._former_roles
            and worker.capability is not None
            and worker.capability.orchestrations
        ]
        candidate = min(able, key=lambda worker: (worker.requests, worker.worker_id), default=None)
        if candidate is None:
            return None
        return candidate, (*candidate.member.registration.roles, Role.DECODE)

    def _spare(self, pools: ModelPools, now_ms: int) -> tuple[Worker, tuple[Role, ...]] | None:
        """Return a worker that need not decode any more, with its roles, if another one does."""
        decoders = [worker for role in DECODERS for worker in pools.pools[role].workers]
        living = {worker.life: worker for worker in decoders if worker.is_alive(now_ms)}
        if not living.keys() - self._former_roles.keys():
            return None
        return next(
            ((living[life], roles) for life, roles in self._former_roles.items() if life in living),
            None,
        )

    def _give(self, worker: Worker, roles: tuple[Role, ...], now_ms: int) -> LendRole:
        if Role.DECODE in roles:
            self._former_roles[worker.life] = tuple(worker.member.registration.roles)
        else:
            del self._former_roles[worker.life]
        order = AssignRoles(
            worker_id=worker.worker_id, worker_epoch=worker.epoch, roles=roles, at_ms=now_ms
        )
        return LendRole(worker.topic, worker.partition, order)
