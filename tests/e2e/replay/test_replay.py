"""What a stack did, recorded from its log and replayed: every decision and effect bit for bit."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from infra.replay import pieces
from infra.replay.collecting import BODIES, NAMES, record
from infra.replay.pieces import replay_side_by_side
from infra.replay.shadowing import read_decisions, run_shadow
from infra.replay.simulation.comparison import LIVE, compare_outcomes, compare_placements
from infra.replay.simulation.comparison import SHADOW as WITH
from infra.replay.simulation.deployment import shape_of
from infra.replay.simulation.run import Changes, what_if
from infra.replay.simulation.traffic import read
from infra.traces.recording import SNAPSHOT, open_recording
from infra.traces.resend import Resend, ResendComparison
from infra.traces.sender import Pace, send
from schemas.codec import Codec
from schemas.errors import ConfigError, RecordError
from schemas.records import DecisionKind
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.connecting import client_options
from streams.log.registry import make_codec
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import LONG_LEASE_MS, long_leases
from tests.replay_check import replayed
from tests.waits import until

SHADOW = "shadow-0"
pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]


async def test_recording_replays_bit_for_bit(kafka: LogSettings, tmp_path: Path) -> None:
    """It does so after a router's death, from snapshots, without bodies and after compaction."""
    begin_ms = wall_ms()
    settings = sim_settings(kafka, decode_step_ms=5.0, router={"snapshot_ms": 2_000})
    async with (
        stack(settings, tmp_path, prefill=1, decode=2, routers=2) as running,
        shadow(kafka),
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        partial_answers = [Answer() for _ in range(12)]
        tasks = [
            asyncio.create_task(client.stream(f"Question {n}", into=answer, max_tokens=600))
            for n, answer in enumerate(partial_answers)
        ]
        await until(lambda: all(len(answer.token_ids) > 20 for answer in partial_answers))
        await running.kill("router-1")
        answers = await asyncio.gather(*tasks)
        middle_ms = wall_ms()
        answers += [await client.stream(f"After {n}") for n in range(4)]
        await _shadowed(kafka)
        path, span = tmp_path / "shadowed.avro", (begin_ms, wall_ms())
        await record(kafka, path, *span, look_back_ms=600_000)
        with long_leases(LONG_LEASE_MS):
            traffic = read(path)
            compared = compare_placements(traffic, await read_decisions(kafka, *span, SHADOW))
            rows = compare_outcomes(traffic, compared, {"policy": "static", "local_share": "1"})
        changes = compared.changes
        assert changes.placements + changes.unseen == len(answers)
        assert rows[LIVE]["answers"] == rows[WITH]["answers"] == changes.placements
        with pytest.raises(ConfigError, match="--shadow-id: expected any of shadow-0, found anot"):
            await read_decisions(kafka, *span, "another")
        resend = await _sent_again(kafka, tmp_path / "live.avro", begin_ms, client)
        await _wait_for_usage(kafka, len(answers) + resend.completed_now)
    assert (resend.completed_then, resend.same, resend.differences) == (16, 16, [])
    assert all(answer.is_done for answer in answers)
    await _compacted(kafka)

    whole = await replayed(kafka, tmp_path / "whole.avro", begin_ms)
    killed = [life for life in whole.lives if not life.is_stopped]
    assert [life.router_id for life in killed] == ["router-1"]
    assert {life.router_id for life in whole.lives} == {"router-0", "router-1"}
    assert len(whole.lives) == 3
    assert sum(life.with_effects for life in whole.lives) > len(answers)

    without = tmp_path / "without.avro"
    less = await replayed(kafka, without, begin_ms, leaves_out=(BODIES, NAMES))
    assert (less.events, len(less.lives)) == (whole.events, 3)
    with long_leases(LONG_LEASE_MS), pytest.MonkeyPatch.context() as patched:
        patched.delattr(pieces, "replay")  # each piece ends as the next one begins
        with open_recording(tmp_path / "whole.avro") as file:
            assert sum(row.kind == SNAPSHOT for row in file.rows()) > len(whole.lives)
        assert replay_side_by_side(tmp_path / "whole.avro", 2).lives == whole.lives
        assert replay_side_by_side(without, 2).lives == less.lives
    with long_leases(LONG_LEASE_MS):
        traffic = read(tmp_path / "whole.avro")
        rows = what_if(traffic, Changes({"policy": "static"})).runs
    assert [shape_of(traffic.workers).name] == ["1P2D"]
    assert list(rows) == ["recorded", "simulated", "policy=static"]
    assert {row["answers"] for row in rows.values()} == {len(answers) + resend.completed_now}

    path = tmp_path / "later.avro"
    later = await replayed(kafka, path, middle_ms, look_back_ms=10_000)
    assert {life.is_stopped for life in later.lives} == {True}
    assert 0 < later.events < whole.events

    await _emptied(kafka, "requests")
    with pytest.raises(RecordError, match=r"requests\[\d\]: the record at \d+ was applied and"):
        await record(kafka, path, begin_ms, wall_ms(), look_back_ms=10_000)


@asynccontextmanager
async def shadow(log: LogSettings) -> AsyncIterator[None]:
    """Beside all routers; every turn would go to where its session is."""
    stop = asyncio.Event()
    running = run_shadow(
        log,
        {"policy": "static", "local_share": "1"},
        shadow_id=SHADOW,
        stop=stop,
        codec=await asyncio.to_thread(make_codec, log),
        snapshot_ms=600_000,
    )
    task = asyncio.create_task(running)
    try:
        yield
    finally:
        stop.set()
        await task


async def _shadowed(log: LogSettings) -> None:
    """Wait until each placement has the shadow's beside it. It has written nothing else, and is in
    no fleet and no group: live records are what they are without it."""

    async def placed(topic: str) -> dict[tuple[str, int], str]:
        codec, router_ids = Codec(), {}
        for message in await _all_of(log, topic):
            decision = codec.decode(message.value)
            if decision.kind in (DecisionKind.PLACE, DecisionKind.REPLACE):
                router_ids[decision.request_id, decision.attempt] = decision.router_id
        return router_ids

    async def is_shadowed() -> bool:
        by_router, by_shadow = await placed("decisions"), await placed("decisions.shadow")
        assert set(by_shadow.values()) <= {SHADOW}
        # What a killed router decided last is not in its journal.
        return {
            placement for placement, router_id in by_router.items() if router_id != "router-1"
        } <= set(by_shadow)

    await until(is_shadowed)
    written_by = {name for name in TOPICS if SHADOW in await _writers(log, name)}
    assert written_by == {"decisions.shadow"}
    async with _admin(log) as admin:
        groups = await admin.list_consumer_groups()
    assert not [name for name, *_ in groups if SHADOW in name]


async def _writers(log: LogSettings, topic: str) -> set[str]:
    """Whom the headers of a topic's records name."""
    headers = [dict(message.headers) for message in await _all_of(log, topic)]
    return {
        header["ce_source"].decode().rpartition("/")[2]
        for header in headers
        if "ce_source" in header
    }


async def _all_of(log: LogSettings, topic: str) -> list[ConsumerRecord]:
    partitions = range(log.partitions(TOPICS[topic].group))
    reader = AssignedReader(log, topic, partitions, client_id="test")
    async with reader.reading("earliest"):
        return await reader.read_to_end()


async def _sent_again(
    log: LogSettings, path: Path, begin_ms: int, client: Client
) -> ResendComparison:
    await record(log, path, begin_ms, wall_ms(), look_back_ms=10_000)
    resend = Resend(path)
    answers = await send(
        resend.trace,
        str(client.http.base_url),
        client.model,
        Pace(speed=math.inf),
        resend.make_body,
        api_key="none",
    )
    return resend.compare(answers)


async def _wait_for_usage(log: LogSettings, count: int) -> None:
    """Wait until routers have read all outcomes: clients are served earlier."""

    async def are_told() -> bool:
        return len(await _all_of(log, "usage")) >= count

    await until(are_told)


async def _compacted(log: LogSettings) -> None:
    """More than compaction takes: nothing of these topics is left."""
    async with _admin(log) as admin:
        await admin.delete_topics([log.topic_prefix + topic for topic in ("fleet", "sessions")])
    await _emptied(log, "outcomes")


async def _emptied(log: LogSettings, topic: str) -> None:
    partitions = range(log.session_partitions)
    places = [TopicPartition(log.topic_prefix + topic, partition) for partition in partitions]
    async with _admin(log) as admin:
        await admin.delete_records({place: RecordsToDelete(-1) for place in places})


@asynccontextmanager
async def _admin(log: LogSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**client_options(log))
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()
