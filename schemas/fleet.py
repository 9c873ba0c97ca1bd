"""Folds the fleet topic into a view: living members, holders of leases, and credits.

Pure: time is an argument. Routers, gateways and workers fold the same records and so agree. A lease
belongs to the first claim by offset among the living members; it ends when its holder's heartbeats
stop. With the broker's timestamps, a member's epoch that was silent for a lease is fenced for good,
and the members' clocks are measured.

While no member writes at all, no lease runs out: the topic's leader was lost and the next one was
not found yet. Members that lived when that began have a whole lease after it. This follows from the
broker's timestamps, so all readers agree.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from schemas.records import (
    Backlog,
    EmbedLoad,
    Faults,
    Heartbeat,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchLoad,
    Wanted,
)

HEARTBEAT_MS = 500
LEASE_MS = 2_500
DEAF_MS = 2 * HEARTBEAT_MS  # without any record for this time, the reader or the topic fails
SILENCE_MAX_MS = 30_000  # a longer silence means that all members had left
# Two workers whose clocks differ by more move no KV: a handle's expiry crosses hosts.
CLOCK_MARGIN_MS = 250
SCALING_TARGET_MS = 5_000  # between two targets; a target is too old after three times this
CLOCK_BEATS = 20  # the fastest of these heartbeats measures a member's clock

_NEW_LOAD = Load()


@dataclass(slots=True)
class Member:
    """A member's state from its records; `seen_ms` is when this process last read one."""

    registration: Registration
    seen_ms: int
    claims: dict[Lease, int] = field(default_factory=dict)  # offsets of this epoch's claims
    state: MemberState = MemberState.STARTING
    credits: dict[tuple[str, Role], int] = field(default_factory=dict)
    load: Load = _NEW_LOAD
    search: SearchLoad | None = None
    embedding: EmbedLoad | None = None
    backlogs: Sequence[Backlog] = ()  # of a router, one for each model
    faults: Faults | None = None
    beat_seq: int = -1
    ahead_ms: int = 0  # its clock minus the broker's, measured

    @property
    def member_id(self) -> str:
        return self.registration.member_id

    @property
    def epoch(self) -> int:
        return self.registration.epoch

    @property
    def condition(self) -> str:
        """Return its state's name; `failing` if it is ready, but reports a fault."""
        fails = self.faults is not None and bool(self.faults.failing)
        return "failing" if fails and self.state is MemberState.READY else self.state.value

    def is_alive(self, now_ms: int) -> bool:
        """Return whether it has reported within its lease and is not gone."""
        return self.state is not MemberState.GONE and now_ms - self.seen_ms <= LEASE_MS


class _MemberClock:
    """The broker's timestamps of one epoch of a member."""

    def __init__(self) -> None:
        self.is_fenced = False
        self._beat_ms: int | None = None  # when its last heartbeat was appended
        self._ahead_ms: deque[int] = deque(maxlen=CLOCK_BEATS)

    def note_logged(self, record: Registration | Heartbeat, logged_ms: int) -> None:
        """Note an appended record of this epoch; fence it after a lease without heartbeats."""
        if self._beat_ms is not None and logged_ms - self._beat_ms > LEASE_MS:
            self.is_fenced = True
        if isinstance(record, Heartbeat):
            self._beat_ms = logged_ms
            self._ahead_ms.append(record.at_ms - logged_ms)

    def extend(self, from_ms: int, to_ms: int) -> None:
        """Give an epoch that was valid when the topic fell silent a whole lease after that."""
        if self._beat_ms is not None:
            self.is_fenced |= from_ms - self._beat_ms > LEASE_MS
            self._beat_ms = to_ms

    @property
    def ahead_ms(self) -> int:
        """Return how far the member's clock is ahead of the broker's, less the shortest time that
        one of the last heartbeats took to the log."""
        return max(self._ahead_ms, default=0)


class FleetView:
    """The view of all members; fold records in offset order with `apply`."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.scaling_target: Wanted | None = None  # the last target of the autoscaler
        self._clocks: dict[tuple[str, int], _MemberClock] = {}
        self._logged_ms = 0  # when the last record was appended
        self._heard_ms = 0  # when this process read it

    def apply(
        self,
        record: Registration | Heartbeat,
        offset: int,
        now_ms: int,
        logged_ms: int | None = None,
    ) -> bool:
        """Fold one record; ignore records of earlier epochs.

        `logged_ms` is when the broker appended it. With it, an epoch that was silent for a lease is
        fenced: all its later records are ignored. Return False for such a record.
        """
        name = record.member_id, record.epoch
        life = self._clocks.get(name)
        if life is None:
            life = self._clocks[name] = _MemberClock()
        if logged_ms is not None:
            self._listen(logged_ms, now_ms)
            life.note_logged(record, logged_ms)
        if life.is_fenced:
            return False
        if isinstance(record, Registration):
            self._register(record, offset, now_ms)
        else:
            self._beat(record, now_ms)
        member = self.members.get(record.member_id)
        if member is not None and member.epoch == record.epoch:
            member.ahead_ms = life.ahead_ms
        return True

    def _listen(self, logged_ms: int, now_ms: int) -> None:
        """Note when a record was appended. A silence of the whole topic before ends no lease."""
        if DEAF_MS < logged_ms - self._logged_ms <= SILENCE_MAX_MS:
            for life in self._clocks.values():
                life.extend(self._logged_ms, logged_ms)
            for member in self.members.values():
                if self._heard_ms - member.seen_ms <= LEASE_MS:
                    member.seen_ms = now_ms
        self._logged_ms, self._heard_ms = max(self._logged_ms, logged_ms), now_ms

    def _register(self, record: Registration, offset: int, now_ms: int) -> None:
        old_member = self.members.get(record.member_id)
        if old_member is not None and old_member.epoch > record.epoch:
            return
        member = Member(registration=record, seen_ms=now_ms)
        claims: dict[Lease, int] = {}
        # A change of roles keeps the state.
        if old_member is not None and old_member.epoch == record.epoch:
            member.state, member.load, member.beat_seq = (
                old_member.state,
                old_member.load,
                old_member.beat_seq,
            )
            member.credits, claims = old_member.credits, old_member.claims
            member.search, member.embedding = old_member.search, old_member.embedding
            member.backlogs, member.faults = old_member.backlogs, old_member.faults
        member.claims = {lease: claims.get(lease, offset) for lease in record.leases}
        self.members[record.member_id] = member

    def _beat(self, record: Heartbeat, now_ms: int) -> None:
        member = self.members.get(record.member_id)
        if member is None or member.epoch != record.epoch or record.seq <= member.beat_seq:
            return
        member.seen_ms = now_ms
        member.beat_seq = record.seq
        member.state = record.state
        member.load, member.search, member.embedding = record.load, record.search, record.embedding
        member.backlogs, member.faults = record.backlogs, record.faults
        member.credits = {(grant.router_id, grant.role): grant.credits for grant in record.grants}

    def scaling_target_at(self, now_ms: int) -> Wanted | None:
        """Return the target counts of workers, unless the last target is too old."""
        target = self.scaling_target
        return None if target is None or now_ms - target.at_ms > 3 * SCALING_TARGET_MS else target

    def apart_ms(self, first: str, second: str) -> int:
        """Return by how much the clocks of two members differ; 0 while one of them is unknown."""
        if first not in self.members or second not in self.members:
            return 0
        return abs(self.members[first].ahead_ms - self.members[second].ahead_ms)

    def living(self, kind: MemberKind, now_ms: int) -> Iterator[Member]:
        """Yield the living members of one kind, in order of their ids."""
        for member_id in sorted(self.members):
            member = self.members[member_id]
            if member.registration.kind is kind and member.is_alive(now_ms):
                yield member

    def holder(self, topic: str, partition: int, now_ms: int) -> Member | None:
        """Return the holder of a partition's lease: the first claim among living members."""
        lease = Lease(topic=topic, partition=partition)
        claimants = [
            member
            for member in self.members.values()
            if lease in member.claims and member.is_alive(now_ms)
        ]
        return min(claimants, key=lambda member: member.claims[lease], default=None)

    def free_partitions(self, topic: str, partition_count: int, now_ms: int) -> list[int]:
        """Return the partitions that no living member claims."""
        return [p for p in range(partition_count) if self.holder(topic, p, now_ms) is None]

    def forget(self, older_than_ms: int, now_ms: int) -> list[str]:
        """Drop members that were silent for longer, which bounds the view; return their ids."""
        stale = [m.member_id for m in self.members.values() if now_ms - m.seen_ms > older_than_ms]
        for member_id in stale:
            del self.members[member_id]
        epochs = {member_id: member.epoch for member_id, member in self.members.items()}
        self._clocks = {
            life: life_clock
            for life, life_clock in self._clocks.items()
            if life[1] >= epochs.get(life[0], 1 << 63)  # the default is above all epochs
        }
        return stale
