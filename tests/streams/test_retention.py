"""What a request may live for and what the broker keeps agree, or nothing starts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.protocol.admin import DescribeConfigsResponse_v2

from schemas.errors import ConfigError
from schemas.settings import LogSettings, ModelSettings
from schemas.topics import HOUR_MS
from streams.agents.lifecycle import run_router
from streams.calls.config import GatewaySettings
from streams.config import RouterSettings
from streams.gateway.app import run_gateway
from streams.log.admin import check_retention, needs_of_requests
from streams.log.connecting import client_options
from tests.streams.gateway.samples import MODEL
from tests.streams.gateway.small_tokenizer import tokenizer_folder

pytestmark = pytest.mark.kafka
LIMIT_S = 120


async def keep(log: LogSettings, topic: str, retention_ms: int) -> None:
    """What an operator does with Kafka's tools."""
    client = AIOKafkaAdminClient(**client_options(log))
    await client.start()
    try:
        config = {"retention.ms": str(retention_ms), "cleanup.policy": "delete"}
        name = log.topic_prefix + topic
        (answer,) = await client.alter_configs(
            [ConfigResource(ConfigResourceType.TOPIC, name, config)]
        )
        assert [resource[0] for resource in answer.resources] == [0]
        resource = ConfigResource(ConfigResourceType.TOPIC, name, {"retention.ms": ""})
        async with asyncio.timeout(LIMIT_S):
            while True:  # brokers apply what the controller has written
                (response,) = await client.describe_configs([resource])
                if response.resources[0][4][0][1] == str(retention_ms):
                    break
    finally:
        await client.close()


async def route(log: LogSettings) -> None:
    await run_router(log, RouterSettings(), router_id="r", stop=asyncio.Event())


async def serve(log: LogSettings) -> None:
    model = ModelSettings(path=str(tokenizer_folder()), name=MODEL)
    settings = GatewaySettings(port=0)
    await run_gateway(log, settings, [model], gateway_id="g", stop=asyncio.Event())


STARTS: dict[str, Callable[[LogSettings], Awaitable[None]]] = {"router": route, "gateway": serve}


@pytest.mark.parametrize("process", STARTS)
async def test_process_refuses_start_when_topic_retention_is_too_short(
    kafka: LogSettings, process: str
) -> None:
    """Once the topic table was checked, and the topics were not."""
    await keep(kafka, "phases", HOUR_MS // 2)
    expected = r"phases: expected retention\.ms of at least .*found 1800000.*raise the topic's"
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ConfigError, match=expected):
            await STARTS[process](kafka)


async def test_check_retention_accepts_lifetime_plus_one_hour(kafka: LogSettings) -> None:
    """Endless retention is accepted, too."""
    await check_retention(kafka, needs_of_requests(23 * HOUR_MS))
    await keep(kafka, "tokens", 3 * HOUR_MS)
    await keep(kafka, "requests", -1)
    await check_retention(kafka, needs_of_requests(2 * HOUR_MS))
    with pytest.raises(ConfigError, match=r"tokens: .*gateway\.deadline_ms_max=7200001, found"):
        await check_retention(kafka, needs_of_requests(2 * HOUR_MS + 1))


async def test_check_retention_warns_when_broker_refuses_to_tell(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refused(
        _: AIOKafkaAdminClient, config_resources: list[ConfigResource]
    ) -> list[DescribeConfigsResponse_v2]:
        return [
            DescribeConfigsResponse_v2(
                0, [(29, "no", 2, resource.name, []) for resource in config_resources]
            )
        ]

    monkeypatch.setattr(AIOKafkaAdminClient, "describe_configs", refused)
    with caplog.at_level(logging.WARNING):
        await check_retention(kafka, needs_of_requests(HOUR_MS))
    assert (
        "tokens: cleanup.policy, retention.ms not told, and not checked: TopicAuth" in caplog.text
    )
