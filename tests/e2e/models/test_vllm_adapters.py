"""LoRA adapters on real vLLM behind real Kafka: handed over, beside each other, after a death."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bench.faults.log_audit import audit
from schemas.records import OutcomeKind
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, stack
from tests.e2e.test_vllm_stack import vllm_settings
from tests.waits import START_S, until
from workers.models.folder import make_tiny_model
from workers.models.random_adapters import make_adapter

# Two engines start, one of them twice.
pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(2_400)]

NAMES = ("tiny", "law", "medicine")
TOKENS = 200


async def answers_of(url: str, partial_answers: dict[str, Answer]) -> dict[str, list[int]]:
    """Ask all models at once, and return the tokens of each."""

    async def ask(name: str, answer: Answer) -> None:
        async with Client(url, name) as client:
            await client.stream("Who reads a log? " * 20, into=answer, max_tokens=TOKENS)

    await asyncio.gather(*(ask(name, answer) for name, answer in partial_answers.items()))
    assert all(answer.is_done for answer in partial_answers.values())
    return {name: answer.token_ids for name, answer in partial_answers.items()}


async def test_adapters_answer_alike_when_their_worker_dies(
    kafka: LogSettings, tmp_path: Path
) -> None:
    base = make_tiny_model(tmp_path / "models")
    adapters = {name: str(make_adapter(tmp_path / name, base, n)) for n, name in enumerate(NAMES)}
    del adapters["tiny"]
    settings = vllm_settings(kafka)
    settings = replace(settings, model=replace(settings.model, adapters=adapters))
    async with stack(settings, tmp_path / "stack", seconds=1_500, prefill=1, decode=1) as running:
        url = running.gateway_urls[0]
        first_answers = {name: Answer() for name in NAMES}
        expected = await answers_of(url, first_answers)
        assert len({tuple(tokens) for tokens in expected.values()}) == len(NAMES)
        for answer in first_answers.values():
            assert answer.trivium["mode"] == "remote"
            assert answer.trivium["kv_bytes"] > 0, "its KV was read, not computed"
        second_answers = {name: Answer() for name in NAMES}
        asking = asyncio.create_task(answers_of(url, second_answers))
        await until(
            lambda: all(len(a.token_ids) > 10 for a in second_answers.values()), seconds=START_S
        )
        await running.kill("decode-0")
        assert await asking == expected
        log_audit = await audit(kafka)
        assert log_audit.kinds() == {OutcomeKind.COMPLETED.value: 2 * len(NAMES)}
        assert log_audit.of_kind("replace"), "they went on elsewhere"
