"""Stacks in which processes die: no accepted request is lost, no stream has a gap or a repeat."""

import asyncio
import signal
from pathlib import Path

import pytest

from infra.bench.faults.expected_answers import alone
from infra.bench.faults.log_audit import audit, read_topic
from schemas.settings import LogSettings
from tests.e2e.audits import decoder, overlooked
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOKENS = 800  # at 5 ms each: long enough to be caught in the middle
LONG = 1_800  # long enough for that whatever stalls meanwhile


async def streams(
    client: Client, count: int, seen: list[Answer], tokens: int = TOKENS
) -> list[Answer]:
    seen += [Answer() for _ in range(count)]
    return await asyncio.gather(
        *(
            client.stream(f"Question {number}", into=answer, max_tokens=tokens)
            for number, answer in enumerate(seen)
        )
    )


def underway(seen: list[Answer]) -> bool:
    return bool(seen) and all(len(answer.token_ids) > 20 for answer in seen)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_decode_worker_is_noticed_and_its_streams_go_on(
    kafka: LogSettings, tmp_path: Path, how: signal.Signals
) -> None:
    settings = sim_settings(kafka, decode_step_ms=5.0)
    async with (
        stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, prefill=1, decode=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        seen: list[Answer] = []
        task = asyncio.create_task(streams(client, 8, seen, LONG))
        await until(lambda: underway(seen))
        answer = next(answer for answer in seen if not answer.done)
        life = worker_id, epoch = await decoder(kafka, answer.headers["x-request-id"])
        await running.kill(worker_id, how)
        answers = await task
        if how is signal.SIGSTOP:  # it wakes up, finds itself fenced, and must write nothing more
            await running.kill(worker_id, signal.SIGCONT)
        answers.append(await client.stream("Who goes on?"))
        found = await audit(kafka)
        expected = await alone(running.settings, found.requests.values())
    for answer in answers:
        assert answer.done
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids
    lost = [d for d in found.of_kind("void") if (d.decode_worker, d.decode_epoch) == life]
    assert lost
    assert {decision.reason for decision in lost} == {"worker_lost"}
    again = {decision.request_id for decision in found.of_kind("replace")}
    assert {decision.request_id for decision in lost} <= again
    noticed_ms = min(decision.at_ms for decision in lost)
    assert await overlooked(kafka, "router-0", life, noticed_ms) == []


async def test_a_lost_prefill_worker_is_replaced(kafka: LogSettings, tmp_path: Path) -> None:
    settings = sim_settings(kafka, prefill_base_ms=400.0)
    async with (
        stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, prefill=2, decode=1) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        tasks = [asyncio.create_task(client.stream(f"Question {n}")) for n in range(12)]

        async def dispatched() -> bool:
            return len(await read_topic(kafka, "prefill")) >= 4

        await until(dispatched)
        await running.kill("prefill-0")
        answers = await asyncio.gather(*tasks)
        assert all(answer.done and len(answer.token_ids) == 32 for answer in answers)
        await audit(kafka)


async def test_a_router_that_restarts_loses_nothing(kafka: LogSettings, tmp_path: Path) -> None:
    settings = sim_settings(kafka, decode_step_ms=5.0, running_max=4)
    async with (
        stack(settings, tmp_path, prefill=1, decode=1) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        seen: list[Answer] = [Answer() for _ in range(10)]  # more than there are credits for
        tasks = [
            asyncio.create_task(client.stream(f"Question {n}", into=answer, max_tokens=300))
            for n, answer in enumerate(seen)
        ]
        await until(lambda: any(len(answer.token_ids) > 20 for answer in seen))
        await running.kill("router-0")
        late = asyncio.create_task(client.stream("Asked while no router lives"))
        answers = await asyncio.gather(*tasks, late)
        assert all(answer.done for answer in answers)
        assert [len(answer.token_ids) for answer in answers] == [300] * 10 + [32]
        await audit(kafka)


async def test_one_of_two_routers_takes_over_the_others_sessions(
    kafka: LogSettings, tmp_path: Path
) -> None:
    settings = sim_settings(kafka, decode_step_ms=5.0)
    async with (
        stack(settings, tmp_path, replica=1, routers=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        seen: list[Answer] = []
        task = asyncio.create_task(streams(client, 12, seen))
        await until(lambda: underway(seen))
        await running.kill("router-1")
        answers = await task
        more = await asyncio.gather(*(client.stream(f"After {n}") for n in range(12)))
        assert all(answer.done for answer in [*answers, *more])
        await audit(kafka)


async def test_a_stream_outlives_its_gateway(kafka: LogSettings, tmp_path: Path) -> None:
    settings = sim_settings(kafka, decode_step_ms=5.0)
    async with (
        stack(settings, tmp_path, replica=1, gateways=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
        Client(running.gateway_urls[1], settings.model.served_name) as other,
    ):
        seen = Answer()
        task = asyncio.create_task(client.stream("Outlive me", into=seen, max_tokens=TOKENS))
        await until(lambda: len(seen.token_ids) > 50)
        await running.kill("gateway-0")
        await asyncio.gather(task, return_exceptions=True)
        rest = await other.resume(seen.headers["x-request-id"], seen.event_ids[-1])
        whole = await other.stream("Outlive me", max_tokens=TOKENS)
        assert rest.done
        assert seen.token_ids + rest.token_ids == whole.token_ids
        assert seen.text + rest.text == whole.text
        await audit(kafka)


async def test_a_drained_worker_finishes_what_it_holds(kafka: LogSettings, tmp_path: Path) -> None:
    settings = sim_settings(kafka, decode_step_ms=5.0)
    async with (
        stack(settings, tmp_path, replica=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        seen: list[Answer] = []
        task = asyncio.create_task(streams(client, 8, seen))
        await until(lambda: underway(seen))
        await running.kill("replica-0", signal.SIGTERM)
        answers = await task
        assert all(answer.done for answer in answers)
        found = await audit(kafka)
    kinds = {d.kind.value for decisions in found.decisions.values() for d in decisions}
    assert "replace" not in kinds


async def test_without_workers_a_request_ends_at_its_deadline(
    kafka: LogSettings, tmp_path: Path
) -> None:
    settings = sim_settings(kafka)
    async with (
        stack(settings, tmp_path, replica=1) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        await running.processes["replica-0"].stop(grace_s=10)
        client.http.headers["x-deadline-ms"] = "3000"  # should its gateway not have heard of that
        answer = await client.chat("Anybody?", max_tokens=4)
        assert answer.status in (503, 504)
        assert answer.error["code"] in ("not_ready", "deadline_exceeded")
