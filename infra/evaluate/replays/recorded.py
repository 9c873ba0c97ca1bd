"""What a recording says of the deployment: its workers, and its router's settings.

Called by `trivium replay`, to simulate one like it.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.replay.recording import LINE, SNAPSHOT, opened
from infra.simulator.shape import Shape
from schemas.errors import RecordError
from schemas.records import JournalSnapshot, MemberState, Orchestration, Registration, Role
from streams.config import RouterSettings
from streams.journal.inputs import STOPPED
from streams.journal.snapshot import unpack_router

LLM_ROLES = (Role.PREFILL, Role.DECODE, Role.REPLICA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Shape):
    """Workers by their own names."""

    named: tuple[tuple[str, tuple[Role, ...]], ...]
    orders: tuple[Orchestration, ...] = ()  # that all of them can do that hand KV over

    def roles(self) -> list[tuple[str, tuple[Role, ...]]]:
        """Worker ids with their roles."""
        return list(self.named)


def workers(found: dict[str, Registration]) -> Workers:
    """These, in order of their names."""
    named = {name: _roles(record) for name, record in found.items()}
    roles = list(named.values())
    return Workers(
        prefill=roles.count((Role.PREFILL,)),
        decode=roles.count((Role.DECODE,)),
        both=sum(len(each) > 1 for each in roles),
        replica=roles.count((Role.REPLICA,)),
        named=tuple(sorted(named.items())),
        orders=_common_orders(found.values()),
    )


def _common_orders(records: Iterable[Registration]) -> tuple[Orchestration, ...]:
    told = [
        record.capability.orchestrations
        for record in records
        if record.capability is not None and record.capability.orchestrations
    ]
    first, *others = told or [()]
    return tuple(each for each in first if all(each in other for other in others))


def deployment(path: Path) -> tuple[Workers, RouterSettings]:
    """All workers that its first router knew or heard of, whenever; raises RecordError."""
    found: dict[str, Registration] = {}
    parts: list[JournalSnapshot] = []
    with opened(path) as recording:
        for row in recording.rows():
            if row.kind == SNAPSHOT:
                if parts and row.router_epoch != parts[0].router_epoch:
                    break
                if not parts or len(parts) < parts[0].parts:  # else it is a later one
                    parts.append(recording.codec.decode(row.value))
            elif row.kind == LINE and row.topic == "fleet":
                record = recording.codec.decode(row.value)
                if isinstance(record, Registration):
                    _add(found, record)
            elif row.topic == STOPPED:
                break
    if not parts:
        raise RecordError(f"{path}: expected a router's state, found none")
    router = unpack_router(b"".join(part.state for part in parts))
    for member in router.tables.fleet.view.members.values():
        if member.state is not MemberState.GONE and member.registration is not None:
            _add(found, member.registration)
    if not found:
        raise RecordError(f"{path}: expected workers, found none; name them with --pools")
    return workers(found), dataclasses.replace(router.settings, table="")


def _add(found: dict[str, Registration], record: Registration) -> None:
    if _roles(record):
        found[record.member_id] = record


def _roles(record: Registration) -> tuple[Role, ...]:
    return tuple(role for role in LLM_ROLES if role in record.roles)
