"""Leases, heartbeats and fencing, with members of one process against a real broker.

Leases last, however long the machine stalls, in all tests but those of how they end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace

import pytest
from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import LeaseError
from schemas.fleet import LEASE_MS
from schemas.records import (
    Capability,
    Grant,
    Heartbeat,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    Wanted,
)
from schemas.settings import LogSettings
from streams.log import membership
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from tests.long_leases import long_leases
from tests.waits import PATIENCE_S, until

pytestmark = pytest.mark.kafka
CAPABILITY = Capability(
    model="m", engine="sim", engine_id="e", block_size=16, max_model_len=128, running_max=4
)


_AHEAD_MS = ContextVar("ahead_ms", default=0)  # of the member whose tasks these are


class Fleet:
    """Members that share one producer, and leave at the end."""

    def __init__(self, settings: LogSettings, producer: LogProducer) -> None:
        self.settings = settings
        self.producer = producer
        self.members: list[Membership] = []

    def member(self, member_id: str, *topics: str) -> Membership:
        member = Membership(
            self.settings,
            Codec(),
            self.producer,
            member_id=member_id,
            kind=MemberKind.WORKER,
            roles=[Role.DECODE],
            lease_topics=topics,
        )
        self.members.append(member)
        return member

    @asynccontextmanager
    async def running(self, *members: Membership) -> AsyncIterator[None]:
        """Have members join together, and each send heartbeats once it has joined."""
        tasks: list[asyncio.Task[None]] = []

        async def live(member: Membership) -> None:
            await member.join()
            tasks.append(asyncio.create_task(member.run()))

        async with task_cleanup(tasks):
            await asyncio.gather(*map(live, members))
            yield

    @asynccontextmanager
    async def following(self, member: Membership) -> AsyncIterator[None]:
        """Have a member join and read on without heartbeats: no lease of its own ends that."""
        with long_leases():
            await member.join()
        async with task_cleanup([asyncio.create_task(member._follow())]):
            yield


@asynccontextmanager
async def task_cleanup(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Cancel the tasks of the list at the end."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def fleet_of(settings: LogSettings, *, leases_last: bool = True) -> AsyncIterator[Fleet]:
    producer = LogProducer(settings, Codec(), durable=True, client_id="fleet")
    await producer.start()
    fleet = Fleet(settings, producer)
    try:
        with long_leases() if leases_last else nullcontext():
            async with asyncio.timeout(PATIENCE_S):
                yield fleet
    finally:
        for member in fleet.members:
            await member.leave()
        await producer.stop()


async def test_members_joining_together_lease_different_partitions(kafka: LogSettings) -> None:
    async with fleet_of(kafka) as fleet:
        count = kafka.worker_partitions
        members = [fleet.member(f"w{n}", "decode") for n in range(count)]
        async with fleet.running(*members):
            assert {member.leases["decode"] for member in members} == set(range(count))


async def test_lease_error_on_full_topic_suggests_remedy(kafka: LogSettings) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        first, second = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        async with fleet.running(first):
            with pytest.raises(LeaseError, match="all 1 partitions of decode are leased; stop a"):
                await second.join()


async def test_rejoining_member_gets_higher_epoch_and_same_partition(
    kafka: LogSettings,
) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        first, second = fleet.member("w1", "decode"), fleet.member("w1", "decode")
        await first.join()
        await second.join()
        assert second.epoch > first.epoch
        assert second.leases == first.leases == {"decode": 0}


async def test_member_claims_no_lease_before_join(
    kafka: LogSettings,
) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        slow, quick = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        await slow.meet()
        epoch = slow.epoch
        await quick.join()
        assert quick.leases == {"decode": 0}
        with pytest.raises(LeaseError, match="all 1 partitions of decode are leased"):
            await slow.join()
        await quick.leave()
        await slow.join()
        assert slow.leases == {"decode": 0}
        assert slow.epoch == epoch


async def test_member_does_not_join_after_newer_process_with_its_name(kafka: LogSettings) -> None:
    async with fleet_of(kafka) as fleet:
        early, late = fleet.member("w1", "decode"), fleet.member("w1", "decode")
        await early.meet()
        await until(lambda: wall_ms() > early.epoch)  # epochs are times of the wall clock
        await late.join()
        with pytest.raises(LeaseError, match="w1: another process took its place"):
            await early.join()


async def test_running_members_lease_further_topics_and_roles(kafka: LogSettings) -> None:
    small = replace(kafka, worker_partitions=2)
    async with fleet_of(small) as fleet:
        members = [fleet.member(f"w{n}", "decode") for n in range(2)]
        late = fleet.member("w2")
        async with fleet.running(*members, late):
            before = [dict(member.leases) for member in members]
            partitions = await asyncio.gather(*(member.lease("prefill") for member in members))
            assert sorted(partitions) == [0, 1]
            with pytest.raises(LeaseError, match="all 2 partitions of prefill are leased"):
                await late.lease("prefill")
            assert late.leases == {}
            for member, earlier, partition in zip(members, before, partitions, strict=True):
                assert member.leases == {**earlier, "prefill": partition}
                holder = late.view.holder("decode", earlier["decode"], wall_ms())
                assert holder is not None
                assert holder.member_id == member.member_id
            await members[0].update(CAPABILITY, [Role.PREFILL, Role.DECODE])
            fleet_members = late.view.members
            await until(lambda: len(fleet_members["w0"].registration.roles) == 2)
            assert fleet_members["w0"].epoch == members[0].epoch


async def test_heartbeats_carry_state_credits_and_load(kafka: LogSettings) -> None:
    records: list[Registration | Heartbeat] = []
    async with fleet_of(kafka) as fleet:
        worker, watcher = fleet.member("w1", "decode"), fleet.member("w2")
        watcher._on_record = lambda record, offset, now_ms: records.append(record)
        worker.load_source = lambda: Load(running=3)
        worker.grant_source = lambda: [Grant(router_id="r1", role=Role.DECODE, credits=5)]
        async with fleet.running(worker), fleet.running(watcher):
            worker.set_state(MemberState.READY)
            await until(lambda: watcher.view.members["w1"].state is MemberState.READY)
        worker_view = watcher.view.members["w1"]
        assert worker_view.load.running == 3
        assert worker_view.credits == {("r1", Role.DECODE): 5}
        assert isinstance(records[0], Registration)


async def test_member_sends_new_state_before_next_heartbeat_is_due(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_MS", 3_600_000)
    async with fleet_of(kafka) as fleet:
        member = fleet.member("decode-0")
        async with fleet.running(member):
            fleet_members = member.view.members
            await until(lambda: "decode-0" in fleet_members)
            member.set_state(MemberState.READY)
            await until(lambda: fleet_members["decode-0"].state is MemberState.READY)


async def test_lease_ends_after_silence_or_immediately_on_leave(
    kafka: LogSettings,
) -> None:
    async with fleet_of(kafka, leases_last=False) as fleet:
        silent, polite, watcher = fleet.member("w1"), fleet.member("w2"), fleet.member("w3")
        lives = watcher.view.members
        async with fleet.following(watcher):
            with long_leases():  # it says goodbye however late
                async with fleet.running(polite):
                    await silent.join()
                await polite.leave()
            await until(lambda: "w2" in lives and lives["w2"].state is MemberState.GONE)
            assert not lives["w2"].is_alive(lives["w2"].seen_ms)
            seen_ms = lives["w1"].seen_ms  # its only heartbeat came before that goodbye
            await until(lambda: not lives["w1"].is_alive(wall_ms()))
            assert lives["w1"].is_alive(seen_ms + LEASE_MS)
            assert not lives["w1"].is_alive(seen_ms + LEASE_MS + 1), "nothing renewed it"


async def test_silent_member_is_fenced_in_every_view(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schemas.fleet.SILENCE_MAX_MS", 0)  # as if others had been heard
    async with fleet_of(kafka, leases_last=False) as fleet:
        frozen, watcher = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        third = fleet.member("w3")
        with long_leases():
            await frozen.join()
        async with fleet.following(watcher):
            await until(lambda: not watcher.view.members["w1"].is_alive(wall_ms()))
            assert not frozen.is_valid(), "it knows before others do"
            await frozen.beat_now()  # what a process does that slept between check and send
            await third.join()
            await until(lambda: "w3" in watcher.view.members)  # it has read past that beat
            for view in (watcher.view, third.view):
                assert view.members["w1"].beat_seq == 0, "nobody believed that beat"
                assert not view.members["w1"].is_alive(wall_ms())
            with pytest.raises(LeaseError, match="silent|lease lost"):
                await frozen.run()


async def test_member_dead_letters_invalid_fleet_records_and_continues(
    kafka: LogSettings,
) -> None:
    scaling_target = Wanted(written_by="up", at_ms=1, pools=())
    async with fleet_of(kafka) as fleet:
        watcher, joiner = fleet.member("w1"), fleet.member("w2")
        dead = AssignedReader(kafka, "fleet.dlq", [0], client_id="dead")
        await dead.start("earliest")
        try:
            async with fleet.running(watcher):
                topic = kafka.topic_prefix + "fleet"
                astray = Lease(topic="decode", partition=kafka.worker_partitions)
                forged = Registration(
                    member_id="w9", epoch=1, kind=MemberKind.WORKER, leases=[astray], started_ms=0
                )
                for value in (b"garbage", Codec().encode(scaling_target), Codec().encode(forged)):
                    await (await fleet.producer.send_raw(topic, value, key=b"w9", partition=0))
                await joiner.join()
                await until(lambda: "w2" in watcher.view.members)
                buried: list[ConsumerRecord] = []
                while len(buried) < 2:
                    buried += await dead.batch()
        finally:
            await dead.stop()
        assert [record.value for record in buried] == [b"garbage", Codec().encode(forged)]
        assert "w9" not in watcher.view.members, "nobody could send work to it"
        assert watcher.view.scaling_target == scaling_target


async def test_member_with_fast_clock_takes_no_active_lease(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once took the others' last heartbeats for older than a lease, by the broker's clock."""
    monkeypatch.setattr(membership, "wall_ms", lambda: wall_ms() + _AHEAD_MS.get())
    async with fleet_of(replace(kafka, worker_partitions=1)) as fleet:
        holder, late = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        async with fleet.running(holder):
            _AHEAD_MS.set(200_000)  # of what this task does, not of those that it has begun
            with pytest.raises(LeaseError, match="all 1 partitions of decode are leased"):
                await late.join()
            _AHEAD_MS.set(0)
