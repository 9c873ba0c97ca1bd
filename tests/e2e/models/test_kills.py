"""Two models and two LoRA adapters while processes die: no call is lost, and none is answered by
another model or adapter than the one that it names."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.bench.faults.log_audit import audit
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from schemas.model.files import model_folder
from schemas.settings import LogSettings, ModelSettings
from tests.e2e.audits import answer_alone
from tests.e2e.harness import Answer, Client, client_of, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from workers.models.folder import resolve_model
from workers.models.random_adapters import make_adapter

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

FIRST, SECOND, LAW, TAX = "org/first", "second", "law", "tax"
NAMES = (FIRST, LAW, TAX, SECOND)
TOKENS = 150
AT_ONCE = 3  # calls of each name
KILLS = ("prefill-0", "decode-0", "decode-2", "router-0", "decode-1")


@pytest.fixture
def settings(kafka: LogSettings, tmp_path: Path) -> Settings:
    base = model_folder(resolve_model(ModelSettings(path="sim"), "sim"))
    folders = {name: str(make_adapter(tmp_path / name, base, 1)) for name in (LAW, TAX)}
    first = ModelSettings(path="sim", name=FIRST, adapters=folders, adapters_max=1)
    second = ModelSettings(path="sim", name=SECOND)
    # Two adapters fit into a worker's memory at once, and one of them into a batch.
    return sim_settings(kafka, decode_step_ms=4.0, adapter_load_ms=20.0).with_models(
        [first, second]
    )


@pytest.fixture
async def running(settings: Settings, tmp_path: Path) -> AsyncIterator[Stack]:
    lease_ms = BRIEF_LEASE_MS
    async with stack(
        *(settings, tmp_path), lease_ms=lease_ms, prefill=1, decode=2, routers=2, gateways=2
    ) as started:
        yield started


async def calls(client: Client, name: str, place: int, stop: asyncio.Event) -> list[Answer]:
    """One call after the other, at least one, until the test stops it; the texts of all names are
    alike."""
    answers: list[Answer] = []
    while not (answers and stop.is_set()):
        question, sampled = f"Who answers {len(answers)}?", {"seed": place, "temperature": 0.8}
        answer = await client.stream(question, into=None, model=name, max_tokens=TOKENS, **sampled)
        answers.append(answer)
    return answers


async def test_every_call_is_answered_by_the_model_that_it_names(running: Stack) -> None:
    stop = asyncio.Event()
    async with client_of(running) as first, client_of(running, 1) as second:
        clients = (first, second)
        tasks = [
            asyncio.create_task(calls(clients[place % 2], name, place, stop))
            for name in NAMES
            for place in range(AT_ONCE)
        ]
        for process in KILLS:
            await running.kill(process)
            await running.wait_ready(process)
        stop.set()
        answers = [answer for group in await asyncio.gather(*tasks) for answer in group]
    log_audit = await audit(running.settings.log)
    expected = await answer_alone(running.settings, log_audit.requests.values())
    for answer in answers:
        assert answer.is_done, answer.error
        request_id = answer.headers["x-request-id"]
        assert answer.token_ids == expected[request_id].token_ids
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers), "all differ"
    names = {request.adapter or request.model for request in log_audit.requests.values()}
    assert names == set(NAMES)
    replaced_ids = {decision.request_id for decision in log_audit.of_kind("replace")}
    assert {log_audit.requests[name].model for name in replaced_ids} == {FIRST, SECOND}
    log_audit.check()
