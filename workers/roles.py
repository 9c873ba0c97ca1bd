"""Checks combinations of roles, and takes orders that change a running worker's roles.

`RoleOrders` keeps the newest valid order until it has been followed. `workers/serving.py` follows
it: it leases missing partitions, announces the roles to the fleet, then refuses new work of roles
that it gave up, and finishes active requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from schemas.errors import ConfigError, LeaseError
from schemas.records import AssignRoles, Capability, Role
from schemas.topics import WORK_TOPICS
from workers.llm.stream import WorkerIdentity

log = logging.getLogger("trivium.worker")


def lease_topics(roles: Iterable[Role]) -> list[str]:
    """Return the topics from which these roles read work; raise ConfigError if they are invalid."""
    roles = set(roles)
    if not roles or roles - WORK_TOPICS.keys():
        raise ConfigError("worker roles: expected prefill, decode or replica")
    if {Role.DECODE, Role.REPLICA} <= roles:
        raise ConfigError("worker roles: decode and replica share their credits; choose one")
    return list(dict.fromkeys(topic for role, topic in WORK_TOPICS.items() if role in roles))


def check_roles(roles: Sequence[Role], capability: Capability) -> None:
    """Raise ConfigError unless the engine can run these roles together."""
    lease_topics(roles)
    if {Role.PREFILL, Role.DECODE} & {*roles} and not capability.orchestrations:
        raise ConfigError(
            f"worker roles: prefill and decode hand KV over, which the engine {capability.engine} "
            "was not started for; it can be a replica"
        )


class RoleOrders:
    """Takes role orders from the log; `run` follows the newest one, until cancelled.

    `follow` raises LeaseError, before it changes anything, if no partition is free.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        capability: Capability,
        follow: Callable[[Sequence[Role]], Awaitable[None]],
    ) -> None:
        self._identity = identity
        self._capability = capability
        self._follow = follow
        self._next_roles: Sequence[Role] | None = None
        self._order_arrived = asyncio.Event()

    def take(self, order: AssignRoles) -> None:
        """Keep an order for `run`; ignore an invalid one, or one for another worker or epoch."""
        identity = self._identity
        if (order.worker_id, order.worker_epoch) != (identity.worker_id, identity.epoch):
            return
        try:
            check_roles(order.roles, self._capability)
        except ConfigError as error:
            log.warning("%s: an order of roles is ignored: %s", identity.worker_id, error.message)
            return
        self._next_roles = tuple(dict.fromkeys(order.roles))
        self._order_arrived.set()

    async def run(self) -> None:
        """Follow one order at a time; skip those that a newer order has replaced."""
        while True:
            await self._order_arrived.wait()
            self._order_arrived.clear()
            roles = self._next_roles
            assert roles is not None
            try:
                await self._follow(roles)
            except LeaseError as error:
                log.warning(
                    "%s: roles stay as they are: %s", self._identity.worker_id, error.message
                )
                continue
            log.info("%s: is now %s", self._identity.worker_id, " and ".join(roles))
