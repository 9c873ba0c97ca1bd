"""Real vLLM behind real Kafka: prefill and decode over NIXL, beside a replica that never hands off.

The replica is the reference: one engine alone, with no connector.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from infra.bench.faults.kill_schedule import BROKER, KILL, FaultInjector, InjectedFault
from infra.bench.faults.log_audit import audit
from infra.broker.section import BrokerSettings
from infra.planning.live_conversations import LiveLoad
from infra.planning.live_stack import PULL, PUSH, Deployment
from infra.research.live.comparison import compare
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.story.record_finder import read_story
from infra.story.steps import steps_of
from schemas.records import Orchestration
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.config import RouterSettings
from tests.conftest import _fresh_topics
from tests.e2e.harness import GATEWAY, Answer, client_of, stack
from tests.waits import PATIENCE_S, START_S, until
from tests.workers.processes import family, lives, niceness, parent
from workers.config import WorkerSettings
from workers.llm.vllm.settings import VllmSettings

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(2_400)]
PATIENT = {"first_token_timeout_ms": 120_000, "progress_timeout_ms": 120_000}

QUESTIONS = [
    "What does a log remember?",
    "Who reads it, and how often? " * 12,
    "Tell me about the weather over a warehouse of records. " * 40,
]


@dataclass
class Pair:
    """Deployments on one broker."""

    remote: Stack
    replica: Stack
    push: Stack


def vllm_settings(log: LogSettings, **engine: Any) -> Settings:
    return Settings(
        log=log,
        model=ModelSettings(path="tiny", max_model_len=1_024),
        gateway=GatewaySettings(**GATEWAY),
        router=RouterSettings(policy="static", local_after_ms=600_000),  # every turn is remote
        worker=WorkerSettings(engine="vllm", drain_timeout_ms=2_000),
        engines={"vllm": {**PATIENT, **engine}},
    )


@pytest.fixture(scope="module")
async def pair(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as opened:
        folder = tmp_path_factory.mktemp
        stacks = [asyncio.create_task(opened.enter_async_context(on_own_broker(folder("replica"))))]
        for mode in ("pull", "push"):
            settings = vllm_settings(await _fresh_topics(bootstrap), kv_transfer=mode)
            running = stack(settings, folder(mode), seconds=1_500, prefill=1, decode=1)
            stacks.append(asyncio.create_task(opened.enter_async_context(running)))
        replica, remote, push = [await starting for starting in stacks]
        yield Pair(remote=remote, replica=replica, push=push)


@asynccontextmanager
async def on_own_broker(folder: Path) -> AsyncIterator[Stack]:
    """A replica with a broker that may die, and with the leases of a deployment."""
    log = LogSettings(session_partitions=1, worker_partitions=2, gateway_partitions=2)
    broker_settings = BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=180.0)
    settings = replace(vllm_settings(log, kv_transfer="off"), broker=broker_settings)
    running = Stack(settings, StackPlan(prefill=0, decode=0, replica=1), folder=folder)
    try:
        await running.start(timeout_s=1_500)
        yield running
    finally:
        await running.stop(grace_s=10)


async def test_remote_answers_equal_single_engine_over_nixl(pair: Pair) -> None:
    async with client_of(pair.remote) as remote, client_of(pair.replica) as alone:
        for question in QUESTIONS:
            answer, expected = await asyncio.gather(
                remote.stream(question, max_tokens=24), alone.stream(question, max_tokens=24)
            )
            assert answer.token_ids == expected.token_ids
            assert answer.text == expected.text
            assert answer.trivium["mode"] == "remote"
            assert expected.trivium["mode"] == "replica"
            assert answer.trivium["kv_bytes"] > 0
    records = await audit(pair.remote.settings.log)
    assert records.kv_bytes() > 0


async def test_concurrent_remote_answers_equal_single_engine(pair: Pair) -> None:
    questions = [f"{number}: {QUESTIONS[number % 3]}" for number in range(8)]
    async with client_of(pair.remote) as remote, client_of(pair.replica) as alone:
        answers = await asyncio.gather(*(remote.stream(q, max_tokens=16) for q in questions))
        expected = await asyncio.gather(*(alone.stream(q, max_tokens=16) for q in questions))
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]


async def test_seeded_sampling_returns_same_answer_remote_and_alone(pair: Pair) -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
    async with client_of(pair.remote) as remote, client_of(pair.replica) as alone:
        answer = await remote.stream(QUESTIONS[0], **fields)
        expected = await alone.stream(QUESTIONS[0], **fields)
    assert answer.token_ids == expected.token_ids


async def test_kv_transfer_moves_only_blocks_missing_in_decode(pair: Pair) -> None:
    async with client_of(pair.remote) as remote:
        remote.http.headers["X-Session-Id"] = "turns"
        opening = "A conversation of its own. " * 30  # decode holds nothing of it yet
        first = await remote.stream(opening, max_tokens=40)
        messages = [
            {"role": "user", "content": opening},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = await remote.stream("", messages=messages, max_tokens=16)
    assert 0 < second.trivium["kv_bytes"] < first.trivium["kv_bytes"]
    assert second.usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_story_lists_steps_of_request(pair: Pair) -> None:
    async with client_of(pair.remote) as remote:
        answer = await remote.stream("Tell the story.", max_tokens=8)
    await audit(pair.remote.settings.log)
    story = await read_story(pair.remote.settings.log, answer.headers["x-request-id"])
    assert story.token_ids == answer.token_ids
    assert story.kv_bytes == answer.trivium["kv_bytes"]
    steps = " ".join(step.what for step in steps_of(story))
    for word in ("accepted", "place remote", "prefill done", "handoff", "over NIXL", "completed"):
        assert word in steps


async def test_handoff_keeps_structured_output_and_logprobs(pair: Pair) -> None:
    async with client_of(pair.remote) as remote:
        body = remote.body("Pick one.", max_tokens=16, ignore_eos=False)
        body["structured_outputs"] = {"choice": ["red", "green"]}
        response = await remote.http.post("/v1/chat/completions", json=body)
        assert response.json()["choices"][0]["message"]["content"] in ("red", "green")
        body = remote.body("Count.", max_tokens=5, logprobs=True, top_logprobs=2)
        response = await remote.http.post("/v1/chat/completions", json=body)
    (choice,) = response.json()["choices"]
    assert len(choice["logprobs"]["content"]) == 5
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])


async def test_stock_clients_return_same_answer(pair: Pair) -> None:
    url = pair.remote.gateway_urls[0] + "/v1"
    model = pair.remote.settings.model.served_name

    def ask() -> list[str]:
        from langchain_openai import ChatOpenAI  # slow to import

        options: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        with OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
            whole: Any = client.chat.completions.create(**options)
            chunks: Any = client.chat.completions.create(**options, stream=True)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        settings: Any = {"base_url": url, "api_key": "none", "model": model, "temperature": 0}
        chain = ChatOpenAI(**settings, max_tokens=8)
        return [whole.choices[0].message.content, text, str(chain.invoke("Hello").content)]

    first, second, third = await asyncio.to_thread(ask)
    assert first == second == third != ""
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
        answer = await client.completions.create(model=model, prompt="Hello", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("deployment", [PULL, PUSH], ids=lambda deployment: deployment.name)
async def test_placement_policies_return_same_answers(pair: Pair, deployment: Deployment) -> None:
    """The reduced form of `trivium evaluate ppd --engine vllm`."""
    load = LiveLoad(conversations=2, turns=4, tokens=12, words=40)
    running = pair.push if deployment is PUSH else pair.remote
    results = await compare(running, pair.replica, deployment.variants, load)
    assert [row["different"] for row in results.values()] == [0] * len(results)
    assert {row["answers"] for row in results.values()} == {8}
    for name in results.keys() - {"x=1", "learned"}:
        assert results[name]["local_share"] == 0.0
        assert results[name]["kv_bytes"] > 0
    if deployment is PULL:
        assert (results["x=1"]["local_share"], results["x=1"]["kv_bytes"]) == (1.0, 0)
        assert results["x=1"]["kv_bytes_turn_1"] > 0
    records = await audit(running.settings.log)
    outcomes = [outcome for (outcome,) in records.outcomes.values()]
    kinds = {outcome.orchestration for outcome in outcomes}
    pairs = {Orchestration.CONCURRENT, Orchestration.DECODE_FIRST}
    assert kinds & pairs == (pairs if deployment is PUSH else set())


async def test_engine_has_lower_priority_and_survives_broker_outage(
    pair: Pair,
) -> None:
    """Process, engine and prefix cache stay, and the running stream ends well."""
    running, usual = pair.replica, os.getpriority(os.PRIO_PROCESS, 0)
    before = {name: process.pid for name, process in running.processes.items()}
    worker, *engine = family(before["replica-0"])
    assert niceness(worker) == {usual}
    computing = [pid for pid in engine if computes(pid)]
    assert VllmSettings().nice > usual
    assert [niceness(pid) for pid in computing] == [{VllmSettings().nice}] * 2
    async with client_of(running) as client:
        first = await client.stream(QUESTIONS[2])
        partial_answer = Answer()
        task = asyncio.create_task(client.stream(QUESTIONS[1], into=partial_answer, max_tokens=600))
        await until(lambda: len(partial_answer.token_ids) > 20)
        await FaultInjector(running).inject(
            InjectedFault(at_s=0, name=BROKER, how=KILL, lasts_s=8.0)
        )
        answer = await task
        await running.wait_ready(timeout_s=START_S)
        second = await client.stream(QUESTIONS[2])
    assert (answer.error, len(answer.token_ids)) == ({}, 600)
    assert second.token_ids == first.token_ids
    assert second.usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert {name: process.pid for name, process in running.processes.items()} == before
    assert [pid for pid in family(worker) if computes(pid)] == [worker, *computing]


async def test_stack_imports_vllm_once_for_all_processes(pair: Pair) -> None:
    """An engine on several cores is started apart: its thread library binds cores on import."""
    for running in (pair.remote, pair.replica, pair.push):
        for name in running.plan.engine_names():
            server = running.forks[name.partition("-")[0]]
            worker, core, computing = (
                pid for pid in family(running.processes[name].pid) if computes(pid)
            )
            spawner = {"1": server.pid}.get(
                running.processes[name].spec.env["OMP_NUM_THREADS"], core
            )
            parents = [parent(pid) for pid in (worker, core, computing)]
            assert parents == [server.pid, server.pid, spawner]


async def test_killed_worker_leaves_no_process(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own processes watch the worker; the kill of its process group is disabled here."""
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    process = pair.replica.processes["replica-0"]
    process.stopping = True  # nobody starts it again
    pids = family(process.pid)
    assert len([pid for pid in pids if computes(pid)]) == 3
    await pair.replica.kill("replica-0")
    await until(lambda: not any(lives(pid) for pid in pids))


def computes(pid: int) -> bool:
    """Whether it is more than Python's tracker of shared memory."""
    return "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()
