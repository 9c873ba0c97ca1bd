"""A gateway that is gone for good: its work ends, but for what its clients read elsewhere."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.bench.faults.expected_answers import answer_alone
from infra.bench.faults.log_audit import audit, read_topic
from schemas.records import Heartbeat, Outcome, OutcomeKind
from schemas.rules.outcomes import counting_outcome
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waiting import until

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
    found: dict[str, list[Outcome]] = {}
    for outcome in await read_topic(log, "outcomes"):
        found.setdefault(outcome.request_id, []).append(outcome)
    return {
        name: end for name, each in found.items() if (end := counting_outcome(each)) is not None
    }


@dataclass
class Reading:
    """What clients of one gateway read when it dies."""

    url: str
    model: str
    seen: list[Answer] = field(default_factory=lambda: [Answer() for _ in range(2 + LEFT)])

    async def read(self) -> None:
        """One stream is to go on without its client, the others have a client that wants them."""
        async with Client(self.url, self.model) as keeper, Client(self.url, self.model) as client:
            keeper.http.headers["x-trivium-on-disconnect"] = "continue"
            streams = [
                (client if n else keeper).stream(f"Question {n}", into=answer, max_tokens=TOKENS)
                for n, answer in enumerate(self.seen)
            ]
            await asyncio.gather(*streams, return_exceptions=True)

    @property
    def underway(self) -> bool:
        return all(len(answer.token_ids) > 20 for answer in self.seen)

    @property
    def request_ids(self) -> list[str]:
        """Of the stream that goes on, the one that is resumed elsewhere, and those left."""
        return [answer.headers["x-request-id"] for answer in self.seen]


async def test_a_lost_gateways_work_ends_unless_somebody_reads_it(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Its workers are free, what was resumed elsewhere or is to go on does, whether it comes back
    or not. Two are lost here: gateway-0 for good, gateway-1 starts again.
    """
    log, router = await kafka_with(gateway_partitions=4), {"gateway_grace_ms": GRACE_MS}
    settings = sim_settings(log, router=router, decode_step_ms=STEP_MS)
    model = settings.model.served_name
    async with (
        stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, replica=1, gateways=3) as running,
        Client(running.gateway_urls[2], model) as other,
    ):
        lost = [Reading(url, model) for url in running.gateway_urls[:2]]
        tasks = [asyncio.create_task(each.read()) for each in lost]
        await until(lambda: all(each.underway for each in lost))
        kept_ids, resumed_ids, *left = zip(*[each.request_ids for each in lost], strict=True)
        left_ids = {request_id for pair in left for request_id in pair}
        running.processes["gateway-0"].stopping = True
        for number in range(2):
            await running.kill(f"gateway-{number}")
        await asyncio.gather(*tasks)
        resumed = [
            asyncio.create_task(other.resume(request_id, each.seen[1].event_ids[-1]))
            for request_id, each in zip(resumed_ids, lost, strict=True)
        ]

        async def left_have_ended() -> bool:
            return left_ids <= set(await ends(log))

        await until(left_have_ended)
        found = await ends(log)
        assert not {*kept_ids, *resumed_ids} & set(found), "they would have ended anyway by now"
        for request_id in left_ids:
            assert found[request_id].kind is OutcomeKind.CANCELLED
            error = found[request_id].error
            assert error is not None and error.message == f"{request_id}: cancelled: gateway_lost"

        async def only_those_run() -> bool:
            return await running_on(log, "replica-0") == 4

        await until(only_those_run)
        rests = await asyncio.gather(*resumed)
        judged = await audit(log)
        wanted = [judged.requests[request_id] for request_id in resumed_ids]
        expected = await answer_alone(running.settings, wanted)
        assert running.processes["gateway-1"].restarts == 1
    for request_id, each, rest in zip(resumed_ids, lost, rests, strict=True):
        assert rest.done
        assert each.seen[1].token_ids + rest.token_ids == expected[request_id].token_ids
    kinds = {request_id: counting_outcome(each) for request_id, each in judged.outcomes.items()}
    completed = {name for name, end in kinds.items() if end and end.kind is OutcomeKind.COMPLETED}
    assert completed == {*kept_ids, *resumed_ids}
    reasons = [d.reason for d in judged.of_kind("cancel")]
    assert reasons == ["gateway_lost"] * len(left_ids)


def responses_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", timeout=300, max_retries=0)


async def test_a_response_outlives_its_gateway(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Streamed on without repeat or gap, polled, continued and deleted elsewhere."""
    log = await kafka_with(gateway_partitions=4)
    settings = sim_settings(log, decode_step_ms=RESPONSE_STEP_MS)
    wanted: Any = {
        "model": settings.model.served_name,
        "max_output_tokens": RESPONSE_TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    async with (
        stack(settings, tmp_path, replica=1, gateways=2) as running,
        responses_client(running.gateway_urls[0]) as lost,
        responses_client(running.gateway_urls[1]) as other,
    ):
        expected = await other.responses.create(input="Tell me of ferries.", **wanted)
        assert expected.status == "incomplete" and expected.usage is not None
        assert expected.usage.output_tokens == RESPONSE_TOKENS
        polled = await lost.responses.create(input="Another", background=True, **wanted)
        stream = await lost.responses.create(
            input="Tell me of ferries.", background=True, stream=True, **wanted
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
        assert rest[-1].response.usage.output_tokens == RESPONSE_TOKENS

        async def is_whole() -> bool:
            return (await other.responses.retrieve(polled.id)).status == "incomplete"

        await until(is_whole)
        following = await other.responses.create(
            input="And then?", previous_response_id=name, **{**wanted, "max_output_tokens": 4}
        )
        assert following.usage is not None
        assert following.usage.input_tokens > RESPONSE_TOKENS, "it has read what was said"
        assert following.usage.input_tokens_details.cached_tokens > RESPONSE_TOKENS / 2, (
            "where its KV lies"
        )
        await other.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(name)
        running_one = await other.responses.create(input="Third", background=True, **wanted)
        cancelled = await other.responses.cancel(running_one.id)
        assert cancelled.status == "cancelled"
