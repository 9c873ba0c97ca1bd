"""Reads the deployment of a recording: its workers, and its router's settings.

Called by `trivium replay`, which simulates such a deployment.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.replay.recording import LINE, SNAPSHOT, open_recording
from infra.simulator.shape import ClusterShape
from schemas.errors import RecordError
from schemas.records import JournalSnapshot, MemberState, Orchestration, Registration, Role
from streams.config import RouterSettings
from streams.journal.journal import STOPPED
from streams.journal.snapshot import unpack_router

LLM_ROLES = (Role.PREFILL, Role.DECODE, Role.REPLICA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(ClusterShape):
    """A cluster shape with the workers' recorded ids."""

    roles_by_name: tuple[tuple[str, tuple[Role, ...]], ...]
    orders: tuple[Orchestration, ...] = ()  # supported by all workers that hand KV over

    def roles(self) -> list[tuple[str, tuple[Role, ...]]]:
        """Return the worker ids with their roles."""
        return list(self.roles_by_name)


def workers(registrations: dict[str, Registration]) -> Workers:
    """Return the shape of the registered workers, in order of their ids."""
    roles_by_name = {name: _roles(record) for name, record in registrations.items()}
    roles = list(roles_by_name.values())
    return Workers(
        prefill=roles.count((Role.PREFILL,)),
        decode=roles.count((Role.DECODE,)),
        both=sum(len(worker_roles) > 1 for worker_roles in roles),
        replica=roles.count((Role.REPLICA,)),
        roles_by_name=tuple(sorted(roles_by_name.items())),
        orders=_common_orders(registrations.values()),
    )


def _common_orders(records: Iterable[Registration]) -> tuple[Orchestration, ...]:
    order_lists = [
        record.capability.orchestrations
        for record in records
        if record.capability is not None and record.capability.orchestrations
    ]
    first, *rest = order_lists or [()]
    return tuple(order for order in first if all(order in orders for orders in rest))


def deployment(path: Path) -> tuple[Workers, RouterSettings]:
    """Return the workers that the first router knew at any time, and its settings; raises
    RecordError."""
    registrations: dict[str, Registration] = {}
    parts: list[JournalSnapshot] = []
    with open_recording(path) as recording:
        for row in recording.rows():
            if row.kind == SNAPSHOT:
                if parts and row.router_epoch != parts[0].router_epoch:
                    break
                if not parts or len(parts) < parts[0].parts:  # else a later snapshot
                    parts.append(recording.codec.decode(row.value))
            elif row.kind == LINE and row.topic == "fleet":
                record = recording.codec.decode(row.value)
                if isinstance(record, Registration):
                    _add(registrations, record)
            elif row.topic == STOPPED:
                break
    if not parts:
        raise RecordError(f"{path}: expected a router's state, found none")
    router = unpack_router(b"".join(part.state for part in parts))
    for member in router.tables.fleet.view.members.values():
        if member.state is not MemberState.GONE and member.registration is not None:
            _add(registrations, member.registration)
    if not registrations:
        raise RecordError(f"{path}: expected workers, found none; name them with --pools")
    return workers(registrations), dataclasses.replace(router.settings, table="")


def _add(registrations: dict[str, Registration], record: Registration) -> None:
    if _roles(record):
        registrations[record.member_id] = record


def _roles(record: Registration) -> tuple[Role, ...]:
    return tuple(role for role in LLM_ROLES if role in record.roles)
