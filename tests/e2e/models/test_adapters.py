"""A stack with LoRA adapters: each call is answered by the adapter that it names, whoever dies."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.bench.faults.log_audit import LogAudit, audit, read_topic
from infra.cli.operate.adapters import rows_of
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from schemas.records import OutcomeKind, Usage, Work
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from tests.e2e.audits import answer_alone, decoder
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import PATIENCE_S, until
from workers.models.random_adapters import make_adapter
from workers.models.sim import SIM_MODEL, make_sim_model

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

LAW, MEDICINE = "org/law", "org/medicine"
NAMES = (SIM_MODEL, LAW, MEDICINE)
TOKENS = 800  # at 5 ms each: long enough to be caught in the middle


def settings_of(log: LogSettings, folder: Path, **engine: Any) -> Settings:
    base = make_sim_model(folder / "base")
    adapters = {
        name: str(make_adapter(folder / f"adapter-{seed}", base, seed))
        for seed, name in enumerate((LAW, MEDICINE))
    }
    settings = sim_settings(log, **engine)
    return replace(settings, model=replace(settings.model, adapters=adapters))


async def check(running: Stack, answers: Mapping[str, Iterable[list[int]]]) -> LogAudit:
    """Every request has one outcome, with the tokens that its model or adapter alone would say."""
    log_audit = await audit(running.settings.log)
    for name, token_ids in answers.items():
        adapter = "" if name == SIM_MODEL else name
        requests = [r for r in log_audit.requests.values() if r.adapter == adapter]
        assert {request.model for request in requests} == {SIM_MODEL}
        expected = await answer_alone(running.settings, requests)
        assert sorted(answer.token_ids for answer in expected.values()) == sorted(token_ids)
    assert {*log_audit.kinds()} == {OutcomeKind.COMPLETED.value}
    return log_audit


async def test_answers_of_adapters_go_on_after_death_of_worker(
    kafka: LogSettings, tmp_path: Path
) -> None:
    settings = settings_of(kafka, tmp_path, decode_step_ms=5.0)
    folder = tmp_path / "stack"
    async with AsyncExitStack() as opened:
        running = await opened.enter_async_context(
            stack(settings, folder, lease_ms=BRIEF_LEASE_MS, prefill=1, decode=2)
        )
        url = running.gateway_urls[0]
        clients = {name: await opened.enter_async_context(Client(url, name)) for name in NAMES}
        partial_answers = {name: [Answer(), Answer(), Answer()] for name in NAMES}
        streaming = asyncio.gather(
            *(
                client.stream("Why a log?", into=answer, max_tokens=TOKENS)
                for name, client in clients.items()
                for answer in partial_answers[name]
            )
        )
        all_answers = [answer for answers in partial_answers.values() for answer in answers]
        await until(lambda: all(len(answer.token_ids) > 20 for answer in all_answers))
        name, _ = await decoder(kafka, partial_answers[LAW][0].headers["x-request-id"])
        await running.kill(name)
        await streaming
        assert all(answer.is_done for answer in all_answers)
        token_lists = {name: [a.token_ids for a in partial_answers[name]] for name in NAMES}
        assert len({tuple(lists[0]) for lists in token_lists.values()}) == len(NAMES)
        await check(running, token_lists)
        orders = [work for work in await read_topic(kafka, "decode") if isinstance(work, Work)]
        assert {work.adapter for work in orders if work.prior_tokens} >= {LAW}, "it went on"
        usage = [r for r in await read_topic(kafka, "usage") if isinstance(r, Usage)]
        assert {record.model for record in usage} == {*NAMES}
        await running.wait_ready()
        assert running.fleet is not None
        rows = rows_of(running.fleet.view, wall_ms())
        assert [(row["adapter"], row["model"]) for row in rows] == [
            (LAW, SIM_MODEL),
            (MEDICINE, SIM_MODEL),
        ]
        assert all(row["loaded"] for row in rows)


async def test_conversation_may_change_its_adapter(kafka: LogSettings, tmp_path: Path) -> None:
    """KV of the earlier turns is computed again, as it is another adapter's."""
    settings = settings_of(kafka, tmp_path)
    async with stack(settings, tmp_path / "stack", prefill=1, decode=1) as running:
        url = f"{running.gateway_urls[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
            cards = {card.id: card.model_dump() for card in (await client.models.list()).data}
            assert {name: cards[name].get("parent") for name in NAMES} == {
                SIM_MODEL: None,
                LAW: SIM_MODEL,
                MEDICINE: SIM_MODEL,
            }
            messages: list[Any] = [{"role": "user", "content": "Why a log? " * 40}]
            cached_tokens, token_lists = [], {name: [] for name in NAMES}  # type: ignore[var-annotated]
            for name in (LAW, LAW, MEDICINE, MEDICINE, SIM_MODEL):
                answer = await client.chat.completions.create(
                    model=name,
                    messages=messages,
                    temperature=0,
                    max_tokens=16,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                assert answer.model == name
                assert answer.usage and answer.usage.prompt_tokens_details
                cached_tokens.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
                token_lists[name].append(answer.choices[0].token_ids)  # type: ignore[attr-defined]
                text = answer.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "And then?"},
                ]
            assert [count > 0 for count in cached_tokens] == [False, True, False, True, False]
            with pytest.raises(openai.NotFoundError, match="'org/nobody'"):
                await client.completions.create(model="org/nobody", prompt="a")
        await check(running, token_lists)
