"""The Faust app: its settings, what is changed in it, and how its agents and rebalances arrive."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from faust.types import TP

from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.log.faust import patches
from streams.log.faust.app import (
    add_agents,
    fetched_ends,
    follow_rebalances,
    make_app,
    pause_partition,
    resume_partition,
    run_app,
)
from streams.log.faust.group import Place
from streams.log.reading.fetching import LOOK_MS
from tests.streams.log.reading.odd_batches import CODECS, batch, produce_batch, with_header_name
from tests.waits import until

LOG = LogSettings(topic_prefix="test.")
TOPICS = ("requests", "phases")


class Member:
    """Records the events and the rebalances that it gets."""

    def __init__(self) -> None:
        self.taken_events: list[tuple[str, bytes]] = []
        self.owned: list[set[Place]] = []

    async def take(self, topic: str, event: Any) -> None:
        self.taken_events.append((topic, event.value))

    def on_assigned(self, places: set[Place]) -> None:
        self.owned.append(places)

    async def on_revoked(self) -> None:
        self.owned.append(set())


def app_of(log: LogSettings = LOG) -> Any:
    return make_app(log, group="test.group", member_id="member-a")


async def test_agent_hands_its_events_to_member() -> None:
    app, member = app_of(), Member()
    for topic, agent in zip(TOPICS, add_agents(app, "test.", "x", TOPICS, member), strict=True):
        async with agent.test_context() as context:
            await context.put(b"garbage-" + topic.encode())
    assert member.taken_events == [(topic, b"garbage-" + topic.encode()) for topic in TOPICS]


async def test_rebalance_names_partitions_by_unprefixed_topic() -> None:
    app, member = app_of(), Member()
    follow_rebalances(app, "test.", member)
    partitions = [SimpleNamespace(topic="test.requests", partition=p) for p in (0, 2)]
    await app.on_partitions_assigned.send(partitions)
    await app.on_partitions_revoked.send(partitions)
    assert member.owned == [{("requests", 0), ("requests", 2)}, set()]


async def test_fetched_ends_skip_unknown_and_unassigned_partitions() -> None:
    ends = {TP("test.requests", 0): 7, TP("test.requests", 1): None}
    consumer = SimpleNamespace(assignment=lambda: set(ends), highwater=ends.__getitem__)
    app: Any = SimpleNamespace(consumer=consumer)
    places = [("requests", number) for number in range(3)]  # the last one is not ours any more
    assert fetched_ends(app, "test.", places) == {("requests", 0): 7}
    assert fetched_ends(None, "test.", ()) == {}, "before there is a consumer"


async def test_app_has_member_settings_and_no_web_server() -> None:
    conf = app_of().conf
    assert conf.id == "test.group"
    assert conf.web_enabled is False
    assert conf.stream_buffer_maxsize == 4_096
    assert conf.consumer_group_instance_id == "member-a"
    assert conf.topic_allow_declare is False


async def test_app_rejects_other_faust_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "version", lambda name: "9.9.9")
    with pytest.raises(ConfigError, match=r"expected faust-streaming 0\.15\.3, found 9\.9\.9"):
        app_of()


async def test_app_consumer_has_patched_settings() -> None:
    app = app_of()
    worker = app.consumer._thread._create_worker_consumer(app.transport)
    assert worker._consumer_timeout == LOOK_MS / 1_000
    assert worker._partition_assignment_strategy == (RangePartitionAssignor,)
    await worker.stop()


async def test_app_joins_group_once_all_agents_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, group_joined = app_of(), asyncio.Event()
    add_agents(app, "test.", "x", TOPICS, Member())

    async def join_group() -> None:
        group_joined.set()

    monkeypatch.setattr(app.tables, "_update_channels", join_group)
    monkeypatch.setattr(app.tables, "_recovery", SimpleNamespace(start=join_group))
    starting = asyncio.create_task(app.tables.on_start())
    for topic in TOPICS:
        await asyncio.sleep(0)
        assert not group_joined.is_set(), "one that is missing would be joined for much later"
        app.topics.add(app.topic("test." + topic))
    await starting
    assert group_joined.is_set()


async def test_security_settings_reach_faust() -> None:
    sasl = LogSettings(
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="u",
        sasl_password="p",
    )
    credentials = app_of(sasl).conf.broker_credentials
    assert str(credentials.mechanism.value) == "SCRAM-SHA-512"
    assert app_of(LogSettings(security_protocol="SSL")).conf.broker_credentials is not None


@pytest.mark.kafka
async def test_member_reads_batches_that_aiokafka_rejects(kafka: LogSettings) -> None:
    app, member = app_of(kafka), Member()
    add_agents(app, kafka.topic_prefix, "x", ["prompts"], member)
    values = [f"{codec} ".encode() * 50 for codec in CODECS]
    for value, codec in zip(values, CODECS, strict=True):
        await produce_batch(kafka, "prompts", batch([value], codec=codec))
        odd = batch([b"odd"], headers=[("name", b"")], codec=codec)
        if codec == "none":
            await produce_batch(kafka, "prompts", with_header_name(odd, b"name", b"n\xffme"))
    running = asyncio.create_task(run_app(app))
    try:
        await until(lambda: len(member.taken_events) == len(values) + 1 or running.done())
    finally:
        await app.stop()
        await asyncio.wait([running])
    assert member.taken_events == [("prompts", value) for value in (values[0], b"odd", *values[1:])]


class FullMember(Member):
    """Has no room for records of one topic."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full, self.room = asyncio.Event(), asyncio.Event()

    async def take(self, topic: str, event: Any) -> None:
        if topic == "requests":
            self.is_full.set()
            await self.room.wait()
        await super().take(topic, event)


@pytest.mark.kafka
async def test_full_agent_does_not_block_other_agents(kafka: LogSettings) -> None:
    """Documents that waited for room once delayed embedding calls in each embedding worker."""
    values, member = [b"%d" % number for number in range(400)], FullMember()
    app = make_app(kafka, group="test.full", member_id="member-a", buffer_max=8)
    add_agents(app, kafka.topic_prefix, "x", TOPICS, member)
    await produce_batch(kafka, "requests", batch(values))
    running = asyncio.create_task(run_app(app))
    try:
        await until(member.is_full.is_set)
        await produce_batch(kafka, "phases", batch([b"later"]))
        await until(lambda: bool(member.taken_events))
        assert member.taken_events == [("phases", b"later")]
        member.room.set()
        await until(lambda: len(member.taken_events) == 1 + len(values))
    finally:
        await app.stop()
        await asyncio.wait([running])
    assert [value for _, value in member.taken_events[1:]] == values


class HoldingMember(Member):
    """Holds the partition of each record of one topic that it takes."""

    event: Any = None

    async def take(self, topic: str, event: Any) -> None:
        await super().take(topic, event)
        if topic == "requests":
            self.event = event
            pause_partition(event)


@pytest.mark.kafka
async def test_paused_partition_delivers_no_records_until_resume(kafka: LogSettings) -> None:
    app, member = make_app(kafka, group="test.held", member_id="member-a"), HoldingMember()
    add_agents(app, kafka.topic_prefix, "x", TOPICS, member)
    await produce_batch(kafka, "requests", batch([b"first"]))
    running = asyncio.create_task(run_app(app))
    try:
        await until(lambda: member.event is not None)
        await produce_batch(kafka, "requests", batch([b"second"]))
        await produce_batch(kafka, "phases", batch([b"other"]))
        await until(lambda: len(member.taken_events) > 1)
        assert member.taken_events[1:] == [("phases", b"other")]
        resume_partition(member.event)
        await until(lambda: len(member.taken_events) > 2)
    finally:
        await app.stop()
        await asyncio.wait([running])
    assert member.taken_events[2:] == [("requests", b"second")]


def test_app_imports_no_http_client_and_no_extensions(tmp_path: Path) -> None:
    code = (
        "import sys; from streams.log.faust.app import add_agents, make_app;"
        "from schemas.settings import LogSettings;"
        "app = make_app(LogSettings(), group='g', member_id='m');"
        "add_agents(app, '', 'x', ['requests'], None);"
        "print({'aiohttp', 'croniter', 'yaml'} & set(sys.modules), app.fixups)"
    )
    env = {**os.environ, "TRIVIUM_HOME": str(tmp_path)}
    program = [sys.executable, "-c", code]
    result = subprocess.run(program, capture_output=True, text=True, env=env, check=True)
    assert result.stdout == "set() []\n"
