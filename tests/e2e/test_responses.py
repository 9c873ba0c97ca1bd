"""Responses in the background, whose gateway is killed, go on and are read at another one."""

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from schemas.settings import LogSettings
from tests.e2e.harness import sim_settings, stack
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

TOKENS, SEEN = 400, 20
STEP_MS = 20.0  # so 8 s: much is left when the gateway dies


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", timeout=300, max_retries=0)


async def test_a_response_outlives_its_gateway(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Streamed on without repeat or gap, polled, continued and deleted elsewhere (issue 12,
    responses).
    """
    log = await kafka_with(gateway_partitions=4)
    settings = sim_settings(log, decode_step_ms=STEP_MS)
    wanted: Any = {
        "model": settings.model.served_name,
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    async with (
        stack(settings, tmp_path, replica=1, gateways=2) as running,
        client(running.gateway_urls[0]) as lost,
        client(running.gateway_urls[1]) as other,
    ):
        expected = await other.responses.create(input="Tell me of ferries.", **wanted)
        assert expected.status == "incomplete" and expected.usage is not None
        assert expected.usage.output_tokens == TOKENS
        polled = await lost.responses.create(input="Another", background=True, **wanted)
        stream = await lost.responses.create(
            input="Tell me of ferries.", background=True, stream=True, **wanted
        )
        events: list[Any] = []
        killed = False
        with contextlib.suppress(openai.APIError):
            async for event in stream:
                events.append(event)
                if len(events) == SEEN:
                    killed = True
                    running.processes["gateway-0"].stopping = True
                    await running.kill("gateway-0")
        assert killed and events[-1].type == "response.output_text.delta"
        name, number = events[0].response.id, events[-1].sequence_number
        assert (await other.responses.retrieve(name)).status == "in_progress"
        rest: list[Any] = [
            event
            async for event in await other.responses.retrieve(
                name, stream=True, starting_after=number
            )
        ]
        assert rest[-1].type == "response.incomplete"
        numbers = [event.sequence_number for event in [*events, *rest]]
        assert numbers == sorted(set(numbers))
        deltas = [e.delta for e in [*events, *rest] if e.type == "response.output_text.delta"]
        assert "".join(deltas) == rest[-1].response.output_text == expected.output_text
        assert rest[-1].response.usage.output_tokens == TOKENS

        async def is_whole() -> bool:
            return (await other.responses.retrieve(polled.id)).status == "incomplete"

        await until(is_whole)
        following = await other.responses.create(
            input="And then?", previous_response_id=name, **{**wanted, "max_output_tokens": 4}
        )
        assert following.usage is not None
        assert following.usage.input_tokens > TOKENS, "it has read what was said"
        assert following.usage.input_tokens_details.cached_tokens > TOKENS / 2, "where its KV lies"
        await other.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(name)
        running_one = await other.responses.create(input="Third", background=True, **wanted)
        cancelled = await other.responses.cancel(running_one.id)
        assert cancelled.status == "cancelled"
