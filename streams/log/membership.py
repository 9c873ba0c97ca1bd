"""Membership in the fleet: registration, leases, heartbeats, and a view of the fleet topic.

Used by workers, gateways and routers alike. A lease belongs to the living member whose claim has
the lowest offset. So a joiner writes a claim, reads it back, and tries another partition if another
member was first. A member that was silent for a lease is fenced: every reader ignores its later
heartbeats, because the broker's timestamps show the gap, and the member itself stops when it
finds out.

Before that, the lease is in doubt: acknowledgements are late, and the member writes nothing
(`wait_until_valid`) until it reads its own heartbeat back from the log, with its timestamp. Without
any acknowledgement a member gives up its lease after two lengths of it: at most one batch of
heartbeats is in flight at a time, so one of the gaps beside it is too long.
"""

import asyncio
import os
import socket
import zlib
from collections.abc import Callable, Sequence

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, LeaseError, NameTaken, RecordError
from schemas.fleet import HEARTBEAT_MS, LEASE_MS, FleetView
from schemas.records import (
    Backlog,
    Capability,
    EmbedCapability,
    EmbedLoad,
    Grant,
    Heartbeat,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchCapability,
    SearchLoad,
    Wanted,
)
from schemas.settings import LogSettings
from schemas.topics import TOPICS, check_record
from streams.log.cancellation import cancel_and_wait, run_within
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter
from streams.log.clock import wall_ms
from streams.log.lease_monitor import LeaseMonitor
from streams.log.reading.faults import FAULTS
from streams.log.retry import wait_for_stop
from streams.log.slices import in_slices

BEAT_SUFFIX = "#beat"
FORGET_MS = 600_000

OnRecord = Callable[[Registration | Heartbeat, int, int], None]


def check_leases(record: object, settings: LogSettings) -> None:
    """Raise RecordError for leases of partitions that do not exist: no record could reach their
    holder."""
    if not isinstance(record, Registration):
        return
    for lease in record.leases:
        topic = TOPICS.get(lease.topic)
        if topic is not None and not 0 <= lease.partition < settings.partitions(topic.group):
            raise RecordError(
                f"fleet: {record.member_id[:80]} leases {lease.topic[:80]}[{lease.partition}], "
                "which is not there; its settings differ from those here"
            )


def _last_beat_s(now_s: float, phase_s: float) -> float:
    """Return when heartbeats were last due, by the clock that all processes of a host share."""
    beat_s = HEARTBEAT_MS / 1000
    return now_s - (now_s - phase_s) % beat_s


class Membership:
    """This process as a member of the fleet. Call `join`, then `run` until the end, then `leave`.

    Call `meet` before `join` if the member needs its epoch before it can serve.
    """

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        *,
        member_id: str,
        kind: MemberKind,
        roles: Sequence[Role] = (),
        lease_topics: Sequence[str] = (),
        url: str = "",
        on_record: OnRecord | None = None,
        former_epoch: int = 0,
        started_ms: int = 0,
    ) -> None:
        """Create a member. `former_epoch` is the epoch of this process's last incarnation, 0 in the
        first; `started_ms` is when the process started, 0 for now."""
        self.member_id = member_id
        self.epoch = 0
        self.leases: dict[str, int] = {}
        self.view = FleetView()
        self.state = MemberState.STARTING
        self.load_source: Callable[[], Load] = Load
        self.grant_source: Callable[[], list[Grant]] = list
        self.search: SearchCapability | None = None  # of a retrieval worker; set before `join`
        self.search_source: Callable[[], SearchLoad | None] = lambda: None
        self.backlogs_source: Callable[[], tuple[Backlog, ...]] = tuple  # of a router
        self.policies: Sequence[str] = ()  # of a router; set before `join`
        self.embedding: EmbedCapability | None = None  # of an embedding worker; likewise
        self.embedding_source: Callable[[], EmbedLoad | None] = lambda: None
        self._settings = settings
        self._codec = codec
        self._producer = producer
        self._kind = kind
        self._roles = tuple(roles)
        self._lease_topics = tuple(lease_topics)
        self._url = url
        self._on_record = on_record
        self._former_epoch = former_epoch
        self._capability: Capability | None = None
        self._started_ms = started_ms or wall_ms()
        self._beat_seq = 0
        self._lease_monitor = LeaseMonitor(settings.replication_factor)
        self._running = False
        self._changed = asyncio.Event()  # a heartbeat should go out before the next one is due
        self._read_offset = -1  # of the last fleet record in the view
        self._progress = asyncio.Event()
        self._reader = AssignedReader(settings, "fleet", [0], client_id=f"{member_id}-fleet")

    async def meet(self) -> None:
        """Read the fleet and choose an epoch, without a claim, so that no lease can be lost.

        For a member that takes long to start; others just `join`. Raises LeaseError if every
        partition of a lease topic is taken, and NameTaken if another process has registered this
        name after this one's last incarnation.
        """
        await self._reader.start("earliest")
        await self._read_all()
        member, former = self.view.members.get(self.member_id), self._former_epoch
        if member is not None and member.epoch > former > 0:
            raise self._name_taken()
        self.epoch = max(wall_ms(), former + 1, member.epoch + 1 if member is not None else 0)
        for topic in self._lease_topics:
            self._choose(topic, set(), wall_ms())

    async def join(self, capability: Capability | None = None) -> None:
        """Read the fleet, claim a partition of each lease topic, and wait until the claims win.

        Raises LeaseError if every partition is taken, or a later epoch of this member exists.
        """
        self._capability = capability
        if self.epoch:
            await self._read_all()  # records since `meet`
        else:
            await self.meet()
        if (member := self.view.members.get(self.member_id)) is not None:
            self.check_name(member.registration)
        losses: set[tuple[str, int]] = set()
        ahead_ms = 0
        while True:
            now_ms = wall_ms() - ahead_ms
            self.leases = {
                topic: self._choose(topic, losses, now_ms) for topic in self._lease_topics
            }
            registered, logged_ms = await self._register()
            # The broker's timestamps of these records decide over other members' leases.
            ahead_ms = max(0, wall_ms() - logged_ms)
            if self.leases:
                await self._read_to(registered)
            await self.beat_now()
            now_ms = wall_ms() - ahead_ms
            beaten = [lease for lease in self.leases.items() if not self._holds(*lease, now_ms)]
            if not beaten:
                return
            losses.update(beaten)

    def check_name(self, record: Registration) -> None:
        """Raise NameTaken if a later epoch of this member has registered; `run` calls it."""
        if record.member_id == self.member_id and record.epoch > self.epoch > 0:
            raise self._name_taken()

    def _name_taken(self) -> NameTaken:
        return NameTaken(f"{self.member_id}: another process took its place; two have its name")

    async def _read_all(self) -> None:
        async for record in in_slices(await self._reader.read_to_end()):
            await self._fold(record, min(record.timestamp, wall_ms()))

    def _choose(self, topic: str, losses: set[tuple[str, int]], now_ms: int) -> int:
        held_partition = self.leases.get(topic)
        if held_partition is not None and (topic, held_partition) not in losses:
            return held_partition
        count = self._settings.partitions(TOPICS[topic].group)
        free = [
            p for p in self.view.free_partitions(topic, count, now_ms) if (topic, p) not in losses
        ]
        own_member = self.view.members.get(self.member_id)
        if own_member is not None:  # leases of this member's earlier epochs are free again
            free += [
                lease.partition
                for lease in own_member.registration.leases
                if lease.topic == topic
                and (topic, lease.partition) not in losses
                and self.view.holder(topic, lease.partition, now_ms) is own_member
            ]
        if not free:
            raise LeaseError(
                f"{self.member_id}: all {count} partitions of {topic} are leased; stop a member "
                f"or use more partitions ([log] {TOPICS[topic].group}_partitions)"
            )
        return free[zlib.crc32(self.member_id.encode()) % len(free)]

    def _holds(self, topic: str, partition: int, now_ms: int) -> bool:
        holder = self.view.holder(topic, partition, now_ms)
        return holder is not None and holder.member_id == self.member_id

    async def lease(self, topic: str) -> int:
        """Claim a partition of one more topic while `run` runs; return it once the claim has won.

        Raises LeaseError if every partition is taken; the other leases stay.
        """
        losses: set[tuple[str, int]] = set()
        while True:
            try:
                partition = self._choose(topic, losses, wall_ms())
            except LeaseError:
                if self.leases.pop(topic, None) is not None:
                    await self._register()
                raise
            self.leases[topic] = partition
            registered, _ = await self._register()
            await self._read_to(registered)
            if self._holds(topic, partition, wall_ms()):
                return partition
            losses.add((topic, partition))

    async def update(self, capability: Capability, roles: Sequence[Role] | None = None) -> None:
        """Publish the engine's capability, once it is known, or a change of roles; leases stay."""
        self._capability = capability
        if roles is not None:
            self._roles = tuple(roles)
        await self._register()

    async def _register(self) -> tuple[int, int]:
        """Write a registration; return its offset, and when the broker appended it."""
        leases = tuple(Lease(topic=t, partition=p) for t, p in self.leases.items())
        registration = Registration(
            member_id=self.member_id,
            epoch=self.epoch,
            kind=self._kind,
            roles=self._roles,
            leases=leases,
            host=socket.gethostname(),
            pid=os.getpid(),
            url=self._url,
            started_ms=self._started_ms,
            capability=self._capability,
            search=self.search,
            embedding=self.embedding,
            policies=tuple(self.policies),
        )
        ack = await self._producer.send("fleet", registration, key=self.member_id, partition=0)
        logged = await ack
        return int(logged.offset), int(logged.timestamp)

    async def _read_to(self, offset: int) -> None:
        """Wait until the view has the record at the offset."""
        while self._read_offset < offset:
            if self._running:
                self._progress.clear()
                await self._progress.wait()
            else:
                await self._read_on(timeout_ms=self._settings.request_timeout_ms)

    async def _read_on(self, *, timeout_ms: int = 60_000) -> None:
        for record in await self._reader.batch(timeout_ms=timeout_ms):
            self._lease_monitor.note_record()
            await self._fold(record, wall_ms())
            self._read_offset = record.offset
        self._progress.set()

    async def run(self) -> None:
        """Send heartbeats and follow the fleet until cancelled. Raise LeaseError if this member is
        fenced."""
        self._running = True
        loops = [asyncio.create_task(loop) for loop in (self._beat_forever(), self._follow())]
        try:
            finished_tasks, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*loops)
        for loop in finished_tasks:
            loop.result()

    async def _beat_forever(self) -> None:
        """Send heartbeats at the same times as all members of this host, which share a clock: so
        readers of the fleet wake up once for all of them. Only routers send theirs in between: the
        topic must not be silent for `DEAF_MS`. Other hosts have other phases."""
        loop, beat_s = asyncio.get_running_loop(), HEARTBEAT_MS / 1000
        phase_s = beat_s / 2 if self._kind is MemberKind.ROUTER else 0.0
        due_s = _last_beat_s(loop.time(), phase_s)
        while True:
            if silent_ms := self._lease_monitor.too_long_ms():
                raise LeaseError(
                    f"{self.member_id}: no acknowledged heartbeat for {silent_ms} ms; lease lost"
                )
            self._changed.clear()
            await self._try_beat()
            due_s = max(due_s + beat_s, _last_beat_s(loop.time(), phase_s))
            if await wait_for_stop(self._changed, due_s - loop.time()):
                due_s -= beat_s  # the regular one stays due

    async def _try_beat(self) -> None:
        try:
            async with asyncio.timeout(LEASE_MS / 1000):
                await self.beat_now()
        except (BrokerUnavailable, KafkaError, TimeoutError):
            return  # the next heartbeat may get through

    async def _follow(self) -> None:
        while True:
            await self._read_on()
            self.view.forget(FORGET_MS, wall_ms())

    async def _fold(self, record: ConsumerRecord, now_ms: int) -> None:
        if record.value is None:
            return
        try:
            decoded = self._codec.decode(record.value)
            check_record("fleet", decoded)
            check_leases(decoded, self._settings)
        except RecordError as error:
            if self._running:  # the members that ran have dead-lettered older ones
                await send_dead_letter(self._producer, record, error)
            return
        if isinstance(decoded, Wanted):
            self.view.scaling_target = decoded
            return
        if not self.view.apply(decoded, record.offset, now_ms, record.timestamp):
            if (decoded.member_id, decoded.epoch) == (self.member_id, self.epoch):
                raise LeaseError(f"{self.member_id}: silent for more than {LEASE_MS} ms; fenced")
            return
        if isinstance(decoded, Heartbeat) and decoded.member_id == self.member_id:
            if decoded.epoch == self.epoch:
                self._lease_monitor.note_read_back(decoded.seq)
        if isinstance(decoded, Registration):
            self.check_name(decoded)
        if self._on_record is not None:
            self._on_record(decoded, record.offset, now_ms)

    def set_state(self, state: MemberState) -> None:
        """Set the state; a heartbeat reports a change at once."""
        if state is not self.state:
            self.state = state
            self._changed.set()

    async def beat_now(self) -> None:
        """Send a heartbeat and wait for its acknowledgement."""
        beat = Heartbeat(
            member_id=self.member_id,
            epoch=self.epoch,
            seq=self._beat_seq,
            at_ms=wall_ms(),
            state=self.state,
            grants=tuple(self.grant_source()),
            load=self.load_source(),
            search=self.search_source(),
            embedding=self.embedding_source(),
            backlogs=self.backlogs_source(),
            faults=FAULTS.record(),
        )
        self._beat_seq += 1
        self._lease_monitor.note_sent(beat.seq)
        key = self.member_id + BEAT_SUFFIX
        await (await self._producer.send("fleet", beat, key=key, partition=0))
        self._lease_monitor.note_acknowledged(beat.seq)

    def is_valid(self) -> bool:
        """Return whether the lease is valid beyond doubt; cheap."""
        return self._lease_monitor.is_valid()

    def waits_for_leader(self) -> bool:
        """Return whether the fleet topic may be without a leader, so that no leases run out."""
        return self._lease_monitor.waits_for_leader()

    async def wait_until_valid(self) -> None:
        """Wait until the lease is valid beyond doubt. Call it before writing or starting work."""
        await self._lease_monitor.wait_until_valid()

    async def leave(self) -> None:
        """Send a goodbye, if the lease is valid, and stop reading; the caller's cancellation is
        raised after that."""
        self.state = MemberState.GONE
        try:
            if self.epoch and self.is_valid():
                await run_within(LEASE_MS / 1000, self._try_beat())
        finally:
            await self._reader.stop()
