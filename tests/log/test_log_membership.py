"""Leases, heartbeats and fencing, with members of one process against a real broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from schemas.codec import Codec
from schemas.errors import LeaseError
from schemas.fleet import LEASE_MS
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import (
    Capability,
    Grant,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from schemas.settings import LogSettings
from tests.waiting import until

pytestmark = pytest.mark.kafka
CAPABILITY = Capability(
    model="m", engine="sim", engine_id="e", block_size=16, max_model_len=128, running_max=4
)


class Fleet:
    """Members that share one producer."""

    def __init__(self, settings: LogSettings, producer: LogProducer) -> None:
        self.settings = settings
        self.producer = producer

    def member(self, member_id: str, *topics: str) -> Membership:
        return Membership(
            self.settings,
            Codec(),
            self.producer,
            member_id=member_id,
            kind=MemberKind.WORKER,
            roles=[Role.DECODE],
            lease_topics=topics,
        )

    @asynccontextmanager
    async def running(self, *members: Membership) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            tasks = [asyncio.create_task(member.run()) for member in members]
            for task in tasks:
                stack.callback(task.cancel)
            yield
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def fleet_of(settings: LogSettings) -> AsyncIterator[Fleet]:
    producer = LogProducer(settings, Codec(), durable=True, client_id="fleet")
    await producer.start()
    try:
        async with asyncio.timeout(30):
            yield Fleet(settings, producer)
    finally:
        await producer.stop()


async def test_members_that_join_together_lease_different_partitions(kafka: LogSettings) -> None:
    async with fleet_of(kafka) as fleet:
        count = kafka.worker_partitions
        members = [fleet.member(f"w{n}", "decode") for n in range(count)]
        await asyncio.gather(*(member.join() for member in members))
        assert {member.leases["decode"] for member in members} == set(range(count))
        for member in members:
            await member.leave()


async def test_a_full_topic_says_what_to_do(kafka: LogSettings) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        first, second = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        await first.join()
        with pytest.raises(LeaseError, match="all 1 partitions of decode are leased; stop a"):
            await second.join()
        await first.leave()
        await second.leave()


async def test_a_new_life_has_a_higher_epoch_and_may_reuse_its_partition(
    kafka: LogSettings,
) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        first = fleet.member("w1", "decode")
        await first.join()
        again = fleet.member("w1", "decode")
        await again.join()
        assert again.epoch > first.epoch
        assert again.leases == first.leases == {"decode": 0}
        await again.leave()
        await first.leave()


async def test_running_members_lease_further_topics_and_roles(kafka: LogSettings) -> None:
    small = replace(kafka, worker_partitions=2)
    async with fleet_of(small) as fleet:
        members = [fleet.member(f"w{n}", "decode") for n in range(2)]
        late = fleet.member("w2")
        await asyncio.gather(*(member.join() for member in [*members, late]))
        before = [dict(member.leases) for member in members]
        async with fleet.running(*members, late):
            found = await asyncio.gather(*(member.lease("prefill") for member in members))
            assert sorted(found) == [0, 1]
            with pytest.raises(LeaseError, match="all 2 partitions of prefill are leased"):
                await late.lease("prefill")
            assert late.leases == {}
            for member, earlier, partition in zip(members, before, found, strict=True):
                assert member.leases == {**earlier, "prefill": partition}
                holder = late.view.holder("decode", earlier["decode"], wall_ms())
                assert holder is not None
                assert holder.member_id == member.member_id
            await members[0].update(CAPABILITY, [Role.PREFILL, Role.DECODE])
            seen = late.view.members
            await until(lambda: len(seen["w0"].registration.roles) == 2)
            assert seen["w0"].epoch == members[0].epoch
        for member in [*members, late]:
            await member.leave()


async def test_beats_carry_state_credits_and_load(kafka: LogSettings) -> None:
    seen: list[Registration | Heartbeat] = []
    async with fleet_of(kafka) as fleet:
        worker, watcher = fleet.member("w1", "decode"), fleet.member("w2")
        watcher._on_record = lambda record, offset, now_ms: seen.append(record)
        worker.load_source = lambda: Load(running=3)
        worker.grant_source = lambda: [Grant(router_id="r1", role=Role.DECODE, credits=5)]
        await worker.join()
        await watcher.join()
        worker.set_state(MemberState.READY)
        async with fleet.running(worker, watcher):
            await until(lambda: watcher.view.members["w1"].state is MemberState.READY)
        found = watcher.view.members["w1"]
        assert found.load.running == 3
        assert found.credits == {("r1", Role.DECODE): 5}
        assert isinstance(seen[0], Registration)
        await worker.leave()
        await watcher.leave()


async def test_the_lease_dies_with_the_heartbeat_and_a_goodbye_is_seen_at_once(
    kafka: LogSettings,
) -> None:
    async with fleet_of(kafka) as fleet:
        silent, polite, watcher = fleet.member("w1"), fleet.member("w2"), fleet.member("w3")
        for member in (silent, polite, watcher):
            await member.join()
        lives = watcher.view.members
        async with fleet.running(watcher):
            await polite.leave()
            await until(lambda: lives["w2"].state is MemberState.GONE)
            assert lives["w1"].lives(wall_ms())
            before_ms = wall_ms()
            await until(lambda: not lives["w1"].lives(wall_ms()))
            assert wall_ms() - before_ms <= LEASE_MS + 500
        await silent.leave()
        await watcher.leave()


async def test_a_member_that_was_silent_for_a_lease_is_fenced_everywhere(
    kafka: LogSettings,
) -> None:
    async with fleet_of(kafka) as fleet:
        frozen, watcher = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        await frozen.join()
        await watcher.join()
        async with fleet.running(watcher):
            await until(lambda: not frozen.is_valid())
            await frozen.beat_now()  # what a process does that slept between check and send
            third = fleet.member("w3")
            await third.join()
            await until(lambda: "w3" in watcher.view.members)  # it has read past that beat
            assert not watcher.view.members["w1"].lives(wall_ms())
            with pytest.raises(LeaseError, match="silent|lease lost"):
                await frozen.run()
        for member in (frozen, watcher, third):
            await member.leave()


async def test_an_undecodable_fleet_record_is_buried_and_the_rest_goes_on(
    kafka: LogSettings,
) -> None:
    async with fleet_of(kafka) as fleet:
        watcher = fleet.member("w1")
        await watcher.join()
        dead = AssignedReader(kafka, "fleet.dlq", [0], client_id="dead")
        await dead.start("earliest")
        async with fleet.running(watcher):
            await (
                await fleet.producer.send_raw(
                    kafka.topic_prefix + "fleet", b"garbage", key=b"w9", partition=0
                )
            )
            other = fleet.member("w2")
            await other.join()
            await until(lambda: "w2" in watcher.view.members)
            (buried,) = await dead.batch()
        assert buried.value == b"garbage"
        for closing in (dead.stop(), other.leave(), watcher.leave()):
            await closing
