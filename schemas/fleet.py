"""The fleet topic folded into a view: who lives, who holds which lease, with how many credits.

Pure: time is an argument. Routers, gateways and workers fold the same records and so agree. A lease
belongs to the first claim by offset among the members that live; it dies with its holder's
heartbeat. Where the broker's own times are given, a life that was silent for longer is fenced for
good, and the clocks of the members are measured.

While nobody at all is heard no lease runs: nobody could write, because the topic's leader had gone
and the next one was not found yet. Whoever lived when that began has a whole lease after it. The
broker's times tell it, so all readers agree.
"""

from collections import deque
from collections.abc import Iterator
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
DEAF_MS = 2 * HEARTBEAT_MS  # no record from anyone for so long: it is the reader, or the topic
SILENCE_MAX_MS = 30_000  # for longer no leader is missed: everybody had gone
# Two workers whose clocks differ by more move no KV: when a handle ends is told across hosts.
CLOCK_MARGIN_MS = 250
SCALING_TARGET_MS = 5_000  # between two words of how many workers are wanted; after three it is old
CLOCK_BEATS = 20  # of which the one that came fastest tells a member's clock

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
    embedding: EmbedLoad | None = None
    backlog: Backlog | None = None
    faults: Faults | None = None
    beat_seq: int = -1
    ahead_ms: int = 0  # its clock over the broker's, measured

    @property
    def member_id(self) -> str:
        return self.registration.member_id

    @property
    def epoch(self) -> int:
        return self.registration.epoch

    @property
    def condition(self) -> str:
        """Its state's name; `failing` where it is ready and yet cannot do what it is there for."""
        fails = self.faults is not None and bool(self.faults.failing)
        return "failing" if fails and self.state is MemberState.READY else self.state.value

    def is_alive(self, now_ms: int) -> bool:
        """Return whether it was heard of within its lease and is not gone."""
        return self.state is not MemberState.GONE and now_ms - self.seen_ms <= LEASE_MS


class _MemberClock:
    """What the broker's clock tells of one life of a member."""

    def __init__(self) -> None:
        self.is_fenced = False
        self._beat_ms: int | None = None  # when its last heartbeat was appended
        self._ahead_ms: deque[int] = deque(maxlen=CLOCK_BEATS)

    def note_logged(self, record: Registration | Heartbeat, logged_ms: int) -> None:
        """A record of this life was appended. After a lease without heartbeats it is over."""
        if self._beat_ms is not None and logged_ms - self._beat_ms > LEASE_MS:
            self.is_fenced = True
        if isinstance(record, Heartbeat):
            self._beat_ms = logged_ms
            self._ahead_ms.append(record.at_ms - logged_ms)

    def extend(self, from_ms: int, to_ms: int) -> None:
        """The topic was silent meanwhile: a life that stood when that began has a whole lease
        after it."""
        if self._beat_ms is not None:
            self.is_fenced |= from_ms - self._beat_ms > LEASE_MS
            self._beat_ms = to_ms

    @property
    def ahead_ms(self) -> int:
        """How far the member's clock is ahead of the broker's, less what the fastest of the last
        heartbeats took to the log."""
        return max(self._ahead_ms, default=0)


class FleetView:
    """All members; fold records in offset order with `apply`."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.scaling_target: Wanted | None = None  # the last word of whoever works it out
        self._clocks: dict[tuple[str, int], _MemberClock] = {}
        self._logged_ms = 0  # when the last record was appended
        self._heard_ms = 0  # and when it was heard here

    def apply(
        self,
        record: Registration | Heartbeat,
        offset: int,
        now_ms: int,
        logged_ms: int | None = None,
    ) -> bool:
        """Fold one record; those of an earlier epoch are ignored.

        `logged_ms` is when the broker appended it. With that a life that was silent for a lease is
        fenced: it can say nothing any more, whatever it is. Returns False for such a record.
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
        """A record was appended then. If the topic was silent before, that ends nobody's lease."""
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
        if (
            old_member is not None and old_member.epoch == record.epoch
        ):  # a role change keeps what is known
            member.state, member.load, member.beat_seq = (
                old_member.state,
                old_member.load,
                old_member.beat_seq,
            )
            member.credits, claims = old_member.credits, old_member.claims
            member.search, member.embedding = old_member.search, old_member.embedding
            member.backlog, member.faults = old_member.backlog, old_member.faults
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
        member.backlog, member.faults = record.backlog, record.faults
        member.credits = {(grant.router_id, grant.role): grant.credits for grant in record.grants}

    def scaling_target_at(self, now_ms: int) -> Wanted | None:
        """Return the target counts of workers, unless the last word is too old."""
        target = self.scaling_target
        return None if target is None or now_ms - target.at_ms > 3 * SCALING_TARGET_MS else target

    def apart_ms(self, first: str, second: str) -> int:
        """By how much the clocks of two members differ; 0 while one of them is unknown."""
        if first not in self.members or second not in self.members:
            return 0
        return abs(self.members[first].ahead_ms - self.members[second].ahead_ms)

    def living(self, kind: MemberKind, now_ms: int) -> Iterator[Member]:
        """Members of one kind that live, in order of their ids."""
        for member_id in sorted(self.members):
            member = self.members[member_id]
            if member.registration.kind is kind and member.is_alive(now_ms):
                yield member

    def holder(self, topic: str, partition: int, now_ms: int) -> Member | None:
        """Who holds the lease of a partition: the first claim among the living."""
        lease = Lease(topic=topic, partition=partition)
        claimants = [
            member
            for member in self.members.values()
            if lease in member.claims and member.is_alive(now_ms)
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
        epochs = {member_id: member.epoch for member_id, member in self.members.items()}
        self._clocks = {
            life: life_clock
            for life, life_clock in self._clocks.items()
            if life[1] >= epochs.get(life[0], 1 << 63)  # more than any epoch
        }
        return stale
