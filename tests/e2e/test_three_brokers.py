"""A stack over three brokers with copies of everything, of which leaders die under load.

Takes minutes, so it runs by itself: `make test-brokers`.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from infra.bench.faults.log_audit import audit
from infra.broker.quorum import BrokerCluster
from infra.broker.section import BrokerSettings
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.log.admin import create_topics
from streams.log.connecting import client_options
from tests.e2e.audits import answer_alone
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.waits import until

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(1_800)]
SETTINGS = BrokerSettings(port=0, heap_mb=256, quick=True, start_timeout_s=200, stop_timeout_s=1)
STREAMS, TOKENS = 12, 1_500


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    broker_cluster = BrokerCluster(SETTINGS, tmp_path / "brokers")
    try:
        broker_cluster.start()
    except ConfigError as error:  # no Java or no jars: the message says which
        pytest.skip(str(error))
    try:
        yield broker_cluster
    finally:
        broker_cluster.reset()


async def leader(log: LogSettings, topic: str) -> int:
    """The node that leads most partitions of a topic; all of them have all copies in sync."""
    admin = AIOKafkaAdminClient(**client_options(log), client_id="test-admin")
    await admin.start()
    leaders: list[int] = []
    try:

        async def whole() -> bool:
            nonlocal leaders
            (description,) = await admin.describe_topics([log.topic_prefix + topic])
            leaders = [partition["leader"] for partition in description["partitions"]]
            return all(
                len(partition["isr"]) == log.replication_factor
                for partition in description["partitions"]
            )

        await until(whole)
        return max(leaders, key=leaders.count)
    finally:
        await admin.close()


async def test_streams_survive_loss_of_partition_leaders(
    cluster: BrokerCluster, tmp_path: Path
) -> None:
    """Leaders of tokens, requests and fleet die in turn, each back before the next one dies."""
    log = LogSettings(
        bootstrap=cluster.bootstrap,
        topic_prefix="three.",
        replication_factor=3,
        worker_partitions=4,
        gateway_partitions=2,
        request_timeout_ms=30_000,
    )
    await create_topics(log)
    settings = sim_settings(log, decode_step_ms=10.0)
    async with (
        stack(settings, tmp_path / "stack", prefill=1, decode=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        answers: list[Answer] = []
        for topic in ("tokens", "requests", "fleet"):
            partial_answers = [Answer() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(client.stream(f"{topic} {n}", into=answer, max_tokens=TOKENS))
                for n, answer in enumerate(partial_answers)
            ]
            await until(
                lambda partial_answers=partial_answers: all(
                    len(answer.token_ids) > 20 for answer in partial_answers
                )
            )
            broker = cluster.brokers[await leader(log, topic)]
            os.kill(broker.pid, signal.SIGKILL)
            late = asyncio.create_task(client.stream(f"{topic}: asked meanwhile"))
            answers += [*await asyncio.gather(*tasks), await late]
            broker.start()
        log_audit = await audit(log)
        expected = await answer_alone(running.settings, log_audit.requests.values())
    for answer in answers:
        assert answer.is_done, answer
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids
