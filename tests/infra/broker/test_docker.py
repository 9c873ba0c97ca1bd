"""A round trip through Kafka in Docker: the same code on a broker that is not ours."""

import subprocess

import pytest

from schemas.codec import Codec
from schemas.records import Cancellation, CancelReason
from schemas.settings import LogSettings
from streams.log.admin import create_topics
from streams.log.clients import AssignedReader, LogProducer
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.docker


def docker_answers() -> bool:
    try:
        process = subprocess.run(
            ["docker", "info"], capture_output=True, check=False, timeout=PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


async def test_docker_broker_round_trips_record() -> None:
    if not docker_answers():
        pytest.skip("no Docker engine answers: Kafka in a container is not tested")
    from testcontainers.community.kafka import KafkaContainer

    with KafkaContainer().with_kraft() as container:
        log = LogSettings(bootstrap=container.get_bootstrap_server(), session_partitions=1)
        await create_topics(log)
        cancellation = Cancellation(
            request_id="r1", session_id="s1", reason=CancelReason.CLIENT_GONE, at_ms=1
        )
        producer = LogProducer(log, Codec(), durable=True, client_id="docker")
        reader = AssignedReader(log, "cancellations", [0], client_id="docker")
        await producer.start()
        await reader.start("earliest")
        try:
            await (await producer.send("cancellations", cancellation, key="s1", partition=0))
            (record,) = await reader.read_to_end()
        finally:
            await reader.stop()
            await producer.stop()
        assert Codec().decode(record.value) == cancellation
