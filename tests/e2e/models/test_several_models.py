"""Two models in one deployment: each call is answered by the model that it names."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.bench.faults.log_audit import audit
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.rolling import load_model
from schemas.errors import ConfigError
from schemas.records import MemberKind, OutcomeKind, Role
from schemas.settings import LogSettings, ModelSettings
from streams.log.clock import wall_ms
from tests.e2e.audits import answer_alone
from tests.e2e.harness import Client, sim_settings, stack
from tests.e2e.test_pools import Load
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import PATIENCE_S, START_S

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

WORDS, TINY = "org/words", "tiny"  # their tokenizers differ


def settings_of(log: LogSettings) -> Settings:
    """Two models with other tokenizers, prompts and lengths."""
    tiny = ModelSettings(path="tiny", name=TINY, tool_parser="none", reasoning_parser="none")
    words = ModelSettings(path="sim", name=WORDS, max_model_len=3_000)
    return sim_settings(log).with_models([words, tiny])


def models_in_fleet(running: Stack) -> dict[str, str]:
    """Return the model of each ready worker, as it has registered."""
    assert running.fleet is not None
    living = running.fleet.view.living(MemberKind.WORKER, wall_ms())
    return {
        w.member_id: w.registration.capability.model for w in living if w.registration.capability
    }


@pytest.fixture
async def running(kafka: LogSettings, tmp_path: Path) -> AsyncIterator[Stack]:
    """Two replicas of each model."""
    async with stack(settings_of(kafka), tmp_path, replica=2) as started:
        yield started


async def check(running: Stack, answers: dict[str, list[list[int]]]) -> None:
    """Every request has one outcome, with the tokens that its model alone would say."""
    log_audit = await audit(running.settings.log)
    assert log_audit.kinds() == {OutcomeKind.COMPLETED.value: sum(map(len, answers.values()))}
    for model, token_ids in answers.items():
        requests = [r for r in log_audit.requests.values() if r.model == model]
        expected = await answer_alone(running.settings.for_model(model), requests)
        assert sorted(answer.token_ids for answer in expected.values()) == sorted(token_ids)


async def test_calls_are_answered_by_the_model_that_they_name(running: Stack) -> None:
    url = f"{running.gateway_urls[0]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
        assert [model.id for model in (await client.models.list()).data] == [WORDS, TINY]

        async def ask(model: str, number: int) -> list[int]:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Question {number}: why a log?"}],
                temperature=0,
                max_tokens=16,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            assert answer.model == model
            return answer.choices[0].token_ids  # type: ignore[attr-defined,no-any-return]

        names = [WORDS, TINY] * 8
        token_lists = await asyncio.gather(
            *(ask(name, number) for number, name in enumerate(names))
        )
        answers = {name: [] for name in (WORDS, TINY)}  # type: dict[str, list[list[int]]]
        for name, token_ids in zip(names, token_lists, strict=True):
            answers[name].append(token_ids)
        await check(running, answers)
        with pytest.raises(openai.NotFoundError, match="'nobody'"):
            await ask("nobody", 0)
        await running.scale(model=TINY, replica=0)
        once = client.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError) as refusal:
            await once.completions.create(model=TINY, prompt="a")
        assert refusal.value.status_code == 503
        assert int(refusal.value.response.headers["retry-after"]) > 0
        assert await ask(WORDS, 99), "the other model serves on"
        await running.scale(model=TINY, replica=1)
        assert await ask(TINY, 99)


async def test_worker_moves_to_another_model_and_back(running: Stack) -> None:
    models = {"replica-0": WORDS, "replica-1": WORDS, "replica-2": TINY, "replica-3": TINY}
    assert models_in_fleet(running) == models
    before = running.processes["replica-1"].pid
    options: dict[str, Any] = {"folder": running.folder, "process_timeout_s": START_S}
    assert await load_model("replica-1", TINY, **options) == WORDS
    assert models_in_fleet(running) == models | {"replica-1": TINY}
    assert running.processes["replica-1"].pid != before
    await running.kill("replica-1")
    await running.wait_ready("replica-1")
    assert models_in_fleet(running) == models | {"replica-1": TINY}, "it keeps the model"
    await running.load_model("replica-1", WORDS, role=Role.DECODE)
    assert models_in_fleet(running) == models
    assert running.fleet is not None
    roles = running.fleet.view.members["replica-1"].registration.roles
    assert list(roles) == [Role.DECODE]
    with pytest.raises(ConfigError, match="expected one of org/words, tiny, found 'x'"):
        await running.load_model("replica-1", "x")
    with pytest.raises(ConfigError, match="worker: expected one of replica-0, .*, found 'r'"):
        await running.load_model("r", TINY)
    await running.scale(model=TINY, replica=1)
    assert running.plan.counts(TINY)["replica"] == 1


@pytest.mark.slow
async def test_no_answer_is_lost_or_of_another_model_while_workers_die_and_move(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    settings = settings_of(await kafka_with(worker_partitions=8))
    async with AsyncExitStack() as opened:
        running = await opened.enter_async_context(
            stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, prefill=2, decode=2)
        )
        url = running.gateway_urls[0]
        clients = {name: Client(url, name) for name in (WORDS, TINY)}
        loads = {
            name: Load(await opened.enter_async_context(client)) for name, client in clients.items()
        }
        loading = [asyncio.create_task(load.run()) for load in loads.values()]

        async def wait_for_more() -> None:
            for load in loads.values():
                await load.wait_for_more(16)

        await wait_for_more()
        for name in ("decode-0", "decode-2", "prefill-1", "prefill-3"):
            await running.kill(name)
            await wait_for_more()
            await running.wait_ready(name)
        await running.load_model("decode-1", TINY)
        await loads[TINY].decoded_by("decode-1")
        await wait_for_more()
        await running.load_model("prefill-2", WORDS)
        await wait_for_more()
        await running.kill("decode-1")
        await running.wait_ready("decode-1")
        await running.load_model("decode-1", WORDS)
        await wait_for_more()
        for load in loads.values():
            load.stopped.set()
        await asyncio.gather(*loading)
        assert all(answer.is_done for load in loads.values() for answer in load.answers)
        answers = {name: [a.token_ids for a in load.answers] for name, load in loads.items()}
        await check(running, answers)
