"""The fleet topic folded into a view: who lives, who holds which lease, with how many credits.

Pure: time is an argument. Routers, gateways and workers fold the same records and so agree. A lease
belongs to the first claim by offset among the members that live; it dies with its holder's
heartbeat.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.records import (
    Heartbeat,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchLoad,
)

HEARTBEAT_MS = 500
LEASE_MS = 2_500

_NEW_LOAD = Load()


@dataclass(slots=True)
class Member:
    """A member as its records tell; `seen_ms` is when this process last heard of it."""

    registration: Registration
    seen_ms: int
    claims: dict[Lease, int] = field(default_factory=dict)  # offset at which this life claimed it
    state: MemberState = MemberState.STARTING
    credits: dict[tuple[str, Role], int] = field(default_factory=dict)
    load: Load = _NEW_LOAD
    search: SearchLoad | None = None
    beat_seq: int = -1

    @property
    def member_id(self) -> str:
        return self.registration.member_id

    @property
    def epoch(self) -> int:
        return self.registration.epoch

    def lives(self, now_ms: int) -> bool:
        """Heard of within the lease, and not gone."""
        return self.state is not MemberState.GONE and now_ms - self.seen_ms <= LEASE_MS


class FleetView:
    """All members; fold records in offset order with `apply`."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}

    def apply(self, record: Registration | Heartbeat, offset: int, now_ms: int) -> None:
        """Fold one record; those of an earlier epoch are ignored."""
        if isinstance(record, Registration):
            self._register(record, offset, now_ms)
        else:
            self._beat(record, now_ms)

    def _register(self, record: Registration, offset: int, now_ms: int) -> None:
        known = self.members.get(record.member_id)
        if known is not None and known.epoch > record.epoch:
            return
        member = Member(registration=record, seen_ms=now_ms)
        claims: dict[Lease, int] = {}
        if known is not None and known.epoch == record.epoch:  # a role change keeps what is known
            member.state, member.load, member.beat_seq = known.state, known.load, known.beat_seq
            member.credits, claims = known.credits, known.claims
            member.search = known.search
        member.claims = {lease: claims.get(lease, offset) for lease in record.leases}
        self.members[record.member_id] = member

    def _beat(self, record: Heartbeat, now_ms: int) -> None:
        member = self.members.get(record.member_id)
        if member is None or member.epoch != record.epoch or record.seq <= member.beat_seq:
            return
        member.seen_ms = now_ms
        member.beat_seq = record.seq
        member.state = record.state
        member.load, member.search = record.load, record.search
        member.credits = {(grant.router_id, grant.role): grant.credits for grant in record.grants}

    def living(self, kind: MemberKind, now_ms: int) -> Iterator[Member]:
        """Members of one kind that live, in order of their ids."""
        for member_id in sorted(self.members):
            member = self.members[member_id]
            if member.registration.kind is kind and member.lives(now_ms):
                yield member

    def holder(self, topic: str, partition: int, now_ms: int) -> Member | None:
        """Who holds the lease of a partition: the first claim among the living."""
        lease = Lease(topic=topic, partition=partition)
        claimants = [
            member
            for member in self.members.values()
            if lease in member.claims and member.lives(now_ms)
        ]
        return min(claimants, key=lambda member: member.claims[lease], default=None)

    def free_partitions(self, topic: str, partition_count: int, now_ms: int) -> list[int]:
        """Partitions that nobody living claims."""
        return [p for p in range(partition_count) if self.holder(topic, p, now_ms) is None]

    def forget(self, older_than_ms: int, now_ms: int) -> list[str]:
        """Drop members silent for longer, so that the view stays bounded; returns their ids."""
        stale = [m.member_id for m in self.members.values() if now_ms - m.seen_ms > older_than_ms]
        for member_id in stale:
            del self.members[member_id]
        return stale
