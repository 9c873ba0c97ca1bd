"""A gateway that is gone for good: its work ends, but for what its clients read elsewhere."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.bench.faults.log_audit import audit, read_topic
from schemas.records import Heartbeat, Outcome, OutcomeKind
from schemas.rules.outcomes import counting_outcome
from schemas.settings import LogSettings
from tests.e2e.audits import answer_alone
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOKENS = 1_500
STEP_MS = 30.0  # so 45 s: much longer than a lease and the grace
GRACE_MS = 8_000
LEFT = 4
RESPONSE_TOKENS, SEEN_EVENTS = 400, 20
RESPONSE_STEP_MS = 20.0  # so 8 s: much is left when the gateway dies


async def running_on(log: LogSettings, worker_id: str) -> int:
    """How many requests it has, as it last said."""
    beats = [b for b in await read_topic(log, "fleet") if isinstance(b, Heartbeat)]
    return next(b.load.running for b in reversed(beats) if b.member_id == worker_id)


async def ends(log: LogSettings) -> dict[str, Outcome]:
    """The outcome that counts of each request that has ended."""
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in await read_topic(log, "outcomes"):
        outcomes.setdefault(outcome.request_id, []).append(outcome)
    return {
        name: end
        for name, request_outcomes in outcomes.items()
        if (end := counting_outcome(request_outcomes)) is not None
    }


@dataclass
class Reading:
    """What clients of one gateway read when it dies."""

    url: str
    model: str
    partial_answers: list[Answer] = field(
        default_factory=lambda: [Answer() for _ in range(2 + LEFT)]
    )

    async def read(self) -> None:
        """One stream is to go on without its client, the others have a client that wants them."""
        async with Client(self.url, self.model) as keeper, Client(self.url, self.model) as client:
            keeper.http.headers["x-trivium-on-disconnect"] = "continue"
            streams = [
                (client if n else keeper).stream(f"Question {n}", into=answer, max_tokens=TOKENS)
                for n, answer in enumerate(self.partial_answers)
            ]
            await asyncio.gather(*streams, return_exceptions=True)

    @property
    def are_streaming(self) -> bool:
        return all(len(answer.token_ids) > 20 for answer in self.partial_answers)

    @property
    def request_ids(self) -> list[str]:
        """Of the stream that goes on, the one that is resumed elsewhere, and those left."""
        return [answer.headers["x-request-id"] for answer in self.partial_answers]


async def test_router_cancels_requests_of_lost_gateway_unless_resumed(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """One lost gateway restarts and one does not; resumed streams continue for both."""
    log, router = await kafka_with(gateway_partitions=4), {"gateway_grace_ms": GRACE_MS}
    settings = sim_settings(log, router=router, decode_step_ms=STEP_MS)
    model = settings.model.served_name
    async with (
        stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, replica=1, gateways=3) as running,
        Client(running.gateway_urls[2], model) as other_client,
    ):
        readings = [Reading(url, model) for url in running.gateway_urls[:2]]
        tasks = [asyncio.create_task(reading.read()) for reading in readings]
        await until(lambda: all(reading.are_streaming for reading in readings))
        kept_ids, resumed_ids, *abandoned_pairs = zip(
            *[reading.request_ids for reading in readings], strict=True
        )
        left_ids = {request_id for pair in abandoned_pairs for request_id in pair}
        running.processes["gateway-0"].stopping = True
        for number in range(2):
            await running.kill(f"gateway-{number}")
        await asyncio.gather(*tasks)
        resumed = [
            asyncio.create_task(
                other_client.resume(request_id, reading.partial_answers[1].event_ids[-1])
            )
            for request_id, reading in zip(resumed_ids, readings, strict=True)
        ]

        async def left_have_ended() -> bool:
            return left_ids <= set(await ends(log))

        await until(left_have_ended)
        outcomes = await ends(log)
        assert not {*kept_ids, *resumed_ids} & set(outcomes), "they would have ended anyway by now"
        for request_id in left_ids:
            assert outcomes[request_id].kind is OutcomeKind.CANCELLED
            error = outcomes[request_id].error
            assert error is not None and error.message == f"{request_id}: cancelled: gateway_lost"

        async def only_those_run() -> bool:
            return await running_on(log, "replica-0") == 4

        await until(only_those_run)
        rests = await asyncio.gather(*resumed)
        judged = await audit(log)
        requests = [judged.requests[request_id] for request_id in resumed_ids]
        expected = await answer_alone(running.settings, requests)
        assert running.processes["gateway-1"].restarts == 1
    for request_id, reading, rest in zip(resumed_ids, readings, rests, strict=True):
        assert rest.is_done
        assert (
            reading.partial_answers[1].token_ids + rest.token_ids == expected[request_id].token_ids
        )
    kinds = {
        request_id: counting_outcome(request_outcomes)
        for request_id, request_outcomes in judged.outcomes.items()
    }
    completed = {name for name, end in kinds.items() if end and end.kind is OutcomeKind.COMPLETED}
    assert completed == {*kept_ids, *resumed_ids}
    reasons = [d.reason for d in judged.of_kind("cancel")]
    assert reasons == ["gateway_lost"] * len(left_ids)


def responses_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", timeout=300, max_retries=0)


async def test_response_survives_gateway_death(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """The response is streamed without a gap, polled, continued and deleted elsewhere."""
    log = await kafka_with(gateway_partitions=4)
    settings = sim_settings(log, decode_step_ms=RESPONSE_STEP_MS)
    options: Any = {
        "model": settings.model.served_name,
        "max_output_tokens": RESPONSE_TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    async with (
        stack(settings, tmp_path, replica=1, gateways=2) as running,
        responses_client(running.gateway_urls[0]) as lost_client,
        responses_client(running.gateway_urls[1]) as other_client,
    ):
        expected = await other_client.responses.create(input="Tell me of ferries.", **options)
        assert expected.status == "incomplete" and expected.usage is not None
        assert expected.usage.output_tokens == RESPONSE_TOKENS
        polled = await lost_client.responses.create(input="Another", background=True, **options)
        stream = await lost_client.responses.create(
            input="Tell me of ferries.", background=True, stream=True, **options
        )
        events: list[Any] = []
        killed = False
        with contextlib.suppress(openai.APIError):
            async for event in stream:
                events.append(event)
                if len(events) == SEEN_EVENTS:
                    killed = True
                    running.processes["gateway-0"].stopping = True
                    await running.kill("gateway-0")
        assert killed and events[-1].type == "response.output_text.delta"
        name, number = events[0].response.id, events[-1].sequence_number
        assert (await other_client.responses.retrieve(name)).status == "in_progress"
        rest: list[Any] = [
            event
            async for event in await other_client.responses.retrieve(
                name, stream=True, starting_after=number
            )
        ]
        assert rest[-1].type == "response.incomplete"
        numbers = [event.sequence_number for event in [*events, *rest]]
        assert numbers == sorted(set(numbers))
        deltas = [e.delta for e in [*events, *rest] if e.type == "response.output_text.delta"]
        assert "".join(deltas) == rest[-1].response.output_text == expected.output_text
        assert rest[-1].response.usage.output_tokens == RESPONSE_TOKENS

        async def is_whole() -> bool:
            return (await other_client.responses.retrieve(polled.id)).status == "incomplete"

        await until(is_whole)
        following = await other_client.responses.create(
            input="And then?", previous_response_id=name, **{**options, "max_output_tokens": 4}
        )
        assert following.usage is not None
        assert following.usage.input_tokens > RESPONSE_TOKENS, "it has read what was said"
        assert following.usage.input_tokens_details.cached_tokens > RESPONSE_TOKENS / 2, (
            "where its KV lies"
        )
        await other_client.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await other_client.responses.retrieve(name)
        running_one = await other_client.responses.create(input="Third", background=True, **options)
        cancelled = await other_client.responses.cancel(running_one.id)
        assert cancelled.status == "cancelled"
