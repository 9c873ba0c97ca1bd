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
from schemas.log import membership
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
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
from tests.long_leases import long_leases
from tests.waiting import PATIENCE_S, until

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
        found = Membership(
            self.settings,
            Codec(),
            self.producer,
            member_id=member_id,
            kind=MemberKind.WORKER,
            roles=[Role.DECODE],
            lease_topics=topics,
        )
        self.members.append(found)
        return found

    @asynccontextmanager
    async def running(self, *members: Membership) -> AsyncIterator[None]:
        """They join together, and each beats as soon as it has joined."""
        tasks: list[asyncio.Task[None]] = []

        async def live(member: Membership) -> None:
            await member.join()
            tasks.append(asyncio.create_task(member.run()))

        async with ended(tasks):
            await asyncio.gather(*map(live, members))
            yield

    @asynccontextmanager
    async def following(self, member: Membership) -> AsyncIterator[None]:
        """It joins and reads on, but does not beat: no lease of its own ends that."""
        with long_leases():
            await member.join()
        async with ended([asyncio.create_task(member._follow())]):
            yield


@asynccontextmanager
async def ended(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Ends the tasks that are there by then."""
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


async def test_members_that_join_together_lease_different_partitions(kafka: LogSettings) -> None:
    async with fleet_of(kafka) as fleet:
        count = kafka.worker_partitions
        members = [fleet.member(f"w{n}", "decode") for n in range(count)]
        async with fleet.running(*members):
            assert {member.leases["decode"] for member in members} == set(range(count))


async def test_a_full_topic_says_what_to_do(kafka: LogSettings) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        first, second = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        async with fleet.running(first):
            with pytest.raises(LeaseError, match="all 1 partitions of decode are leased; stop a"):
                await second.join()


async def test_a_new_life_has_a_higher_epoch_and_may_reuse_its_partition(
    kafka: LogSettings,
) -> None:
    small = replace(kafka, worker_partitions=1)
    async with fleet_of(small) as fleet:
        first, again = fleet.member("w1", "decode"), fleet.member("w1", "decode")
        await first.join()
        await again.join()
        assert again.epoch > first.epoch
        assert again.leases == first.leases == {"decode": 0}


async def test_a_member_that_met_the_fleet_claims_nothing_until_it_joins(
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


async def test_a_member_whose_later_life_came_first_does_not_join(kafka: LogSettings) -> None:
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


async def test_beats_carry_state_credits_and_load(kafka: LogSettings) -> None:
    seen: list[Registration | Heartbeat] = []
    async with fleet_of(kafka) as fleet:
        worker, watcher = fleet.member("w1", "decode"), fleet.member("w2")
        watcher._on_record = lambda record, offset, now_ms: seen.append(record)
        worker.load_source = lambda: Load(running=3)
        worker.grant_source = lambda: [Grant(router_id="r1", role=Role.DECODE, credits=5)]
        async with fleet.running(worker), fleet.running(watcher):
            worker.set_state(MemberState.READY)
            await until(lambda: watcher.view.members["w1"].state is MemberState.READY)
        found = watcher.view.members["w1"]
        assert found.load.running == 3
        assert found.credits == {("r1", Role.DECODE): 5}
        assert isinstance(seen[0], Registration)


async def test_a_new_state_is_told_before_the_next_beat_is_due(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_MS", 3_600_000)
    async with fleet_of(kafka) as fleet:
        member = fleet.member("decode-0")
        async with fleet.running(member):
            known = member.view.members
            await until(lambda: "decode-0" in known)
            member.set_state(MemberState.READY)
            await until(lambda: known["decode-0"].state is MemberState.READY)


async def test_the_lease_dies_with_the_heartbeat_and_a_goodbye_is_seen_at_once(
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


async def test_a_member_that_was_silent_for_a_lease_is_fenced_everywhere(
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


async def test_an_undecodable_fleet_record_is_buried_and_the_rest_goes_on(
    kafka: LogSettings,
) -> None:
    wanted = Wanted(written_by="up", at_ms=1, pools=())
    async with fleet_of(kafka) as fleet:
        watcher, other = fleet.member("w1"), fleet.member("w2")
        dead = AssignedReader(kafka, "fleet.dlq", [0], client_id="dead")
        await dead.start("earliest")
        try:
            async with fleet.running(watcher):
                topic = kafka.topic_prefix + "fleet"
                astray = Lease(topic="decode", partition=kafka.worker_partitions)
                forged = Registration(
                    member_id="w9", epoch=1, kind=MemberKind.WORKER, leases=[astray], started_ms=0
                )
                for value in (b"garbage", Codec().encode(wanted), Codec().encode(forged)):
                    await (await fleet.producer.send_raw(topic, value, key=b"w9", partition=0))
                await other.join()
                await until(lambda: "w2" in watcher.view.members)
                buried: list[ConsumerRecord] = []
                while len(buried) < 2:
                    buried += await dead.batch()
        finally:
            await dead.stop()
        assert [record.value for record in buried] == [b"garbage", Codec().encode(forged)]
        assert "w9" not in watcher.view.members, "nobody could send work to it"
        assert watcher.view.scaling_target == wanted


async def test_a_member_whose_clock_is_ahead_takes_no_lease_that_is_held(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the others' last heartbeats, by the broker's clock, for older than a lease."""
    monkeypatch.setattr(membership, "wall_ms", lambda: wall_ms() + _AHEAD_MS.get())
    async with fleet_of(replace(kafka, worker_partitions=1)) as fleet:
        holder, late = fleet.member("w1", "decode"), fleet.member("w2", "decode")
        async with fleet.running(holder):
            _AHEAD_MS.set(200_000)  # of what this task does, not of those that it has begun
            with pytest.raises(LeaseError, match="all 1 partitions of decode are leased"):
                await late.join()
            _AHEAD_MS.set(0)
