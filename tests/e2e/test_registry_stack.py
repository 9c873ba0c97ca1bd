"""The framing switch end to end: with a schema registry, every record is Confluent-framed."""

from dataclasses import replace
from pathlib import Path

import pytest

from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from tests.e2e.harness import Client, sim_settings, stack
from tests.streams.log.registry_stub import running_registry

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]


async def first_values(log: LogSettings, topic: str, partitions: int) -> list[bytes]:
    reader = AssignedReader(log, topic, range(partitions), client_id="look")
    await reader.start("earliest")
    records = await reader.read_to_end()
    await reader.stop()
    return [record.value for record in records]


async def test_processes_frame_records_with_schema_registry(
    kafka: LogSettings, tmp_path: Path
) -> None:
    with running_registry() as registry:
        log = replace(kafka, schema_registry=registry.url)
        settings = sim_settings(log)
        async with (
            stack(settings, tmp_path, prefill=1, decode=1) as running,
            Client(running.gateway_urls[0], settings.model.served_name) as client,
        ):
            answer = await client.stream("Framed?")
            assert answer.is_done
            assert answer.trivium["mode"] == "remote"
    for topic, partitions in {"requests": 2, "decisions": 2, "prefill": 4, "phases": 2}.items():
        values = await first_values(log, topic, partitions)
        assert values
        assert {value[:1] for value in values} == {b"\x00"}, topic
    values = await first_values(log, "tokens", 2)
    assert {value[:1] for value in values} == {b"\x00"}
