"""Moves a worker from pool to pool while it runs: writes an order, then watches the fleet topic.

The worker finishes its requests, and keeps its engine, its caches and its epoch
(`workers/roles.py`). When `trivium up` restarts it, it keeps its new roles (`launcher.py`). A
worker restarted by hand has the roles of its command line again.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from infra.stack.fleet_watch import SLOW_S, FleetWatch, wait_for_update
from schemas.errors import ConfigError, NotReady
from schemas.fleet import Member
from schemas.records import AssignRoles, MemberKind, MemberState, Role
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from workers.roles import check_roles, lease_topics


def find_worker(fleet: FleetWatch, worker_id: str) -> Member:
    """Return a language model worker that is alive and ready.

    Raises ConfigError, with the names of the living workers, where there is none or its roles
    cannot be moved; NotReady where it is not ready.
    """
    living = {
        worker.member_id: worker for worker in fleet.view.living(MemberKind.WORKER, wall_ms())
    }
    member = living.get(worker_id)
    if member is None:
        worker_names = ", ".join(living) or "none"
        raise ConfigError(f"no worker {worker_id!r} lives; expected one of: {worker_names}")
    served = {Role.RETRIEVAL, Role.EMBEDDING}.intersection(member.registration.roles)
    if served:
        raise ConfigError(
            f"{worker_id} serves {served.pop()}; expected a worker with a language model's engine"
        )
    if member.state is not MemberState.READY or member.registration.capability is None:
        raise NotReady(f"{worker_id} is {member.state}; only a ready worker can be moved")
    return member


async def wait_for_worker(fleet: FleetWatch, worker_id: str) -> Member:
    """Return the worker as `find_worker` does, after up to `SLOW_S` if it is known but silent."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SLOW_S):
            while _is_silent(fleet.view.members.get(worker_id)):
                await wait_for_update(fleet)
    return find_worker(fleet, worker_id)


def _is_silent(member: Member | None) -> bool:
    return (
        member is not None
        and member.state is not MemberState.GONE
        and not member.is_alive(wall_ms())
    )


async def move_worker(
    fleet: FleetWatch,
    producer: LogProducer,
    log: LogSettings,
    worker_id: str,
    roles: Sequence[Role],
    *,
    timeout_s: float,
) -> Member:
    """Give a worker these roles and wait until the fleet shows them; `fleet` must be followed.

    Raises ConfigError if the worker cannot follow the order, NotReady after `timeout_s`.
    """
    member = await wait_for_worker(fleet, worker_id)
    capability = member.registration.capability
    assert capability is not None  # a ready worker has one
    check_roles(roles, capability)
    _check_partitions(fleet, log, member, roles)
    lease = member.registration.leases[0]
    order = AssignRoles(
        worker_id=worker_id, worker_epoch=member.epoch, roles=tuple(roles), at_ms=wall_ms()
    )
    ack = await producer.send(lease.topic, order, key=worker_id, partition=lease.partition)
    await ack
    try:
        async with asyncio.timeout(timeout_s):
            while not _has(member, roles):
                await wait_for_update(fleet)
                member = _same_life(fleet, order)
    except TimeoutError:
        raise NotReady(
            f"{worker_id} is still {_words(member)} after {timeout_s:g} s; its log says why"
        ) from None
    return member


def _check_partitions(
    fleet: FleetWatch, log: LogSettings, member: Member, roles: Sequence[Role]
) -> None:
    leased = {lease.topic for lease in member.registration.leases}
    for topic in lease_topics(roles):
        count = log.partitions(TOPICS[topic].group)
        if topic not in leased and not fleet.view.free_partitions(topic, count, wall_ms()):
            raise ConfigError(
                f"all {count} partitions of {topic} are leased; stop a worker, or use more "
                "partitions ([log] worker_partitions)"
            )


def _has(member: Member, roles: Sequence[Role]) -> bool:
    """Return whether the roles are registered and no other role has credits any more."""
    granted = {role for _, role in member.credits}
    return {*member.registration.roles} == {*roles} and granted <= {*roles}


def _same_life(fleet: FleetWatch, order: AssignRoles) -> Member:
    """Return the worker as it is now.

    Raises NotReady if it was restarted, or is silent while other members are not.
    """
    member = fleet.view.members.get(order.worker_id)
    if member is None or not member.is_alive(fleet.last_record_ms):
        raise NotReady(f"{order.worker_id} fell silent before it had followed the order")
    if member.epoch != order.worker_epoch:
        raise NotReady(
            f"{order.worker_id} was started anew before it had followed the order, and is "
            f"{_words(member)}; move it again"
        )
    return member


def _words(member: Member) -> str:
    return " and ".join(member.registration.roles) or "without a role"
