"""Stacks in which processes die: no accepted request is lost, no stream has a gap or a repeat.

Two stacks for all tests, each of which begins when everything is there again.
"""

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from infra.bench.faults.log_audit import LogAudit, audit, read_topic
from infra.stack.launcher import Stack
from schemas.records import Continued, Work
from tests.conftest import _fresh_topics
from tests.e2e.audits import answer_alone, decoder, overlooked
from tests.e2e.harness import Answer, Client, client_of, met, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOKENS = 800  # at 5 ms each: long enough to be caught in the middle
LONG = 3_600  # 18 s: longer than most stalls
AT_LEAST = 100  # tokens that each answer has when its worker dies
SAMPLED = {"temperature": 0.8, "seed": 11}
# What the rest of an answer may depend on besides its tokens; the form has more than LONG tokens.
KINDS: Sequence[dict[str, Any]] = (
    {},
    SAMPLED,
    {"stop": ["#~#"], **SAMPLED},
    {"guided_choice": ["xq" * 1_850, "qx" * 1_850]},
)
RUNNING_MAX = 6  # of each replica


async def ready(running: Stack) -> Stack:
    """When all processes are there again, and routers know it."""
    await running.wait_ready()
    await met(running)
    return running


@pytest.fixture(scope="module")
async def pools(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Workers are lost by their silence here, so leases are brief."""
    log = await _fresh_topics(bootstrap)
    settings = sim_settings(log, decode_step_ms=5.0, prefill_base_ms=200.0)
    settings = replace(settings, model=replace(settings.model, max_model_len=LONG + 1_000))
    folder = tmp_path_factory.mktemp("pools")
    async with stack(settings, folder, lease_ms=BRIEF_LEASE_MS, prefill=2, decode=2) as running:
        yield running


@pytest.fixture(scope="module")
async def replicas(
    bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """Two of each kind."""
    settings = sim_settings(
        await _fresh_topics(bootstrap), decode_step_ms=5.0, running_max=RUNNING_MAX
    )
    folder = tmp_path_factory.mktemp("replicas")
    async with stack(settings, folder, replica=2, routers=2, gateways=2) as running:
        yield running


def streams(
    client: Client,
    partial_answers: list[Answer],
    about: str,
    tokens: int = TOKENS,
    kinds: Sequence[dict[str, Any]] = ({}, SAMPLED),
) -> "asyncio.Future[list[Answer]]":
    """Start streams into these answers, of these kinds in turn: greedy or sampled, if not given."""
    return asyncio.gather(
        *(
            client.stream(
                f"{about} {number}",
                into=answer,
                max_tokens=tokens,
                **kinds[number % len(kinds)],
            )
            for number, answer in enumerate(partial_answers)
        )
    )


def have(partial_answers: list[Answer], min_tokens: int = 20) -> bool:
    """Whether each answer has so many tokens."""
    return all(len(answer.token_ids) > min_tokens for answer in partial_answers)


def tokens_written(log_audit: LogAudit, names: Iterable[str]) -> dict[str, int]:
    """Tokens of each answer that stand in the log, those of several attempts counted each."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for frame in log_audit.frames:
        rows = zip(
            *(frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts), strict=True
        )
        for request_id, attempt, first, count in rows:
            places[request_id] |= {(attempt, place) for place in range(first, first + count)}
    return {name: len(places[name]) for name in names}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_answers_continue_after_worker_death(pools: Stack, how: signal.Signals) -> None:
    """Of any kind, they equal uninterrupted answers, and only the rest is computed."""
    running, log = await ready(pools), pools.settings.log
    async with client_of(running) as client:
        partial_answers = [Answer() for _ in range(8)]
        task = streams(client, partial_answers, how.name, LONG, KINDS)
        await until(lambda: have(partial_answers, AT_LEAST))
        answer = next(answer for answer in partial_answers if not answer.is_done)
        life = worker_id, epoch = await decoder(log, answer.headers["x-request-id"])
        await running.kill(worker_id, how)
        try:
            whole = await task
        finally:
            if how is signal.SIGSTOP:  # it finds itself fenced, and must write nothing more
                await running.kill(worker_id, signal.SIGCONT)
        whole.append(await client.stream("Who goes on?"))
    answers = {answer.headers["x-request-id"]: answer for answer in whole}
    log_audit = await audit(log)
    expected = await answer_alone(running.settings, [log_audit.requests[name] for name in answers])
    for name, answer in answers.items():
        assert answer.is_done
        assert (answer.token_ids, answer.text) == (expected[name].token_ids, expected[name].text)
        assert all(outcome.prompt_tokens < AT_LEAST for outcome in log_audit.outcomes[name])
    void_decisions = [
        d for d in log_audit.of_kind("void") if (d.decode_worker, d.decode_epoch) == life
    ]
    assert void_decisions
    assert {decision.reason for decision in void_decisions} == {"worker_lost"}
    replaced_ids = {decision.request_id for decision in log_audit.of_kind("replace")}
    assert {decision.request_id for decision in void_decisions} <= replaced_ids
    noticed_ms = min(decision.at_ms for decision in void_decisions)
    assert await overlooked(log, "router-0", life, noticed_ms) == []
    orders = [w for w in await read_topic(log, "decode") if isinstance(w, Work) and w.prior_tokens]
    next_attempts = {(decision.request_id, decision.attempt + 1) for decision in void_decisions}
    going_on = [order for order in orders if (order.request_id, order.attempt) in next_attempts]
    continued_ids = {
        r.request_id for r in await read_topic(log, "phases") if isinstance(r, Continued)
    }
    assert going_on and {order.request_id for order in going_on} <= continued_ids
    assert all(order.prior_tokens > AT_LEAST for order in going_on)
    written = tokens_written(log_audit, answers)
    for order in going_on:  # decode draws prefill's token again, in either attempt
        assert written[order.request_id] < LONG + AT_LEAST / 2


async def test_router_replaces_lost_prefill_worker(pools: Stack) -> None:
    running, log = await ready(pools), pools.settings.log
    before = len(await read_topic(log, "prefill"))

    async def dispatched() -> bool:
        return len(await read_topic(log, "prefill")) >= before + 4

    async with client_of(running) as client:
        tasks = [asyncio.create_task(client.stream(f"Question {n}")) for n in range(12)]
        await until(dispatched)
        await running.kill("prefill-0")
        answers = await asyncio.gather(*tasks)
    assert all(answer.is_done and len(answer.token_ids) == 32 for answer in answers)
    await audit(log)


async def test_router_loses_nothing_after_restart_during_kv_transfer(pools: Stack) -> None:
    running = await ready(pools)
    async with client_of(running) as client:
        partial_answers = [Answer() for _ in range(12)]
        task = streams(client, partial_answers, "Moved", 300)
        await until(lambda: any(have([answer]) for answer in partial_answers))
        await running.kill("router-0")
        answers = await task
    assert [len(answer.token_ids) for answer in answers if answer.is_done] == [300] * len(
        partial_answers
    )
    await audit(running.settings.log)


async def test_routers_lose_nothing_after_restart(replicas: Stack) -> None:
    running = await ready(replicas)
    async with client_of(running) as client:
        partial_answers = [
            Answer() for _ in range(2 * RUNNING_MAX + 2)
        ]  # more than there are credits for
        task = streams(client, partial_answers, "Question", 300)
        await until(lambda: any(have([answer]) for answer in partial_answers))
        for number in range(2):
            await running.kill(f"router-{number}")
        late = asyncio.create_task(client.stream("Asked while no router lives"))
        answers = [*await task, await late]
    assert all(answer.is_done for answer in answers)
    assert [len(answer.token_ids) for answer in answers] == [300] * len(partial_answers) + [32]
    await audit(running.settings.log)


async def test_router_takes_over_sessions_of_dead_router(replicas: Stack) -> None:
    running = await ready(replicas)
    async with client_of(running) as client:
        partial_answers = [Answer() for _ in range(2 * RUNNING_MAX)]
        task = streams(client, partial_answers, "Before")
        await until(lambda: have(partial_answers))
        await running.kill("router-1")
        answers = await task
        later_answers = await asyncio.gather(*(client.stream(f"After {n}") for n in range(12)))
    assert all(answer.is_done for answer in [*answers, *later_answers])
    await audit(running.settings.log)


async def test_stream_resumes_after_gateway_death(replicas: Stack) -> None:
    running = await ready(replicas)
    async with client_of(running) as client, client_of(running, gateway=1) as other_client:
        partial_answer = Answer()
        task = asyncio.create_task(
            client.stream("Outlive me", into=partial_answer, max_tokens=TOKENS)
        )
        await until(lambda: len(partial_answer.token_ids) > 50)
        await running.kill("gateway-0")
        await asyncio.gather(task, return_exceptions=True)
        rest = await other_client.resume(
            partial_answer.headers["x-request-id"], partial_answer.event_ids[-1]
        )
        whole = await other_client.stream("Outlive me", max_tokens=TOKENS)
    assert rest.is_done
    assert partial_answer.token_ids + rest.token_ids == whole.token_ids
    assert partial_answer.text + rest.text == whole.text
    await audit(running.settings.log)


async def test_drained_worker_finishes_active_requests(replicas: Stack) -> None:
    running = await ready(replicas)
    async with client_of(running) as client:
        partial_answers = [Answer() for _ in range(8)]
        task = streams(client, partial_answers, "Drain")
        await until(lambda: have(partial_answers))
        await running.kill("replica-0", signal.SIGTERM)
        answers = await task
    assert all(answer.is_done for answer in answers)
    log_audit = await audit(running.settings.log)
    names = [answer.headers["x-request-id"] for answer in answers]
    assert "replace" not in {d.kind.value for name in names for d in log_audit.decisions[name]}


async def test_request_without_workers_ends_at_deadline(replicas: Stack) -> None:
    """It stays the last test of this module, as it stops the workers for good."""
    running = await ready(replicas)
    async with client_of(running) as client:
        await asyncio.gather(
            *(running.processes[f"replica-{n}"].stop(grace_s=10) for n in range(2))
        )
        client.http.headers["x-deadline-ms"] = "3000"  # should its gateway not have heard of that
        answer = await client.chat("Anybody?", max_tokens=4)
    assert answer.status in (503, 504)
    assert answer.error["code"] in ("not_ready", "deadline_exceeded")
