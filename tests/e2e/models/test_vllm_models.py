"""Two models on real vLLM: a call gets the answer of its model, also from a worker that moved."""

from pathlib import Path

import openai
import pytest

from infra.stack.configuration import Settings
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from tests.e2e.harness import GATEWAY, stack
from tests.waits import PATIENCE_S
from workers.config import WorkerSettings
from workers.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(2_400)]
A, B = "org/a", "org/b"


async def test_worker_answers_as_the_model_that_it_has_loaded(
    kafka: LogSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models differ in their weights alone."""
    paths = {A: tmp_path / "a", B: tmp_path / "b"}
    for number, path in enumerate(paths.values()):
        monkeypatch.setattr(tiny, "SEED", tiny.SEED + number)
        path.mkdir()
        tiny.write_tiny_model(path)
    models = [
        ModelSettings(name=name, path=str(path), max_model_len=512) for name, path in paths.items()
    ]
    settings = Settings(
        log=kafka,
        gateway=GatewaySettings(**GATEWAY | {"wait_ms": 1}),
        worker=WorkerSettings(engine="vllm", drain_timeout_ms=2_000),
        engines={"vllm": {"progress_timeout_ms": 120_000}},
    ).with_models(models)
    async with stack(settings, tmp_path / "home", seconds=1_500, replica=1) as running:
        url = f"{running.gateway_urls[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:

            async def ask(model: str) -> str:
                messages: list[openai.types.chat.ChatCompletionMessageParam] = [
                    {"role": "user", "content": "What does a log remember?"}
                ]
                answer = await client.with_options(max_retries=0).chat.completions.create(
                    model=model, messages=messages, temperature=0, max_tokens=16
                )
                return answer.choices[0].message.content or ""

            answers = {name: await ask(name) for name in (A, B)}
            assert answers[A] != answers[B]
            await running.load_model("replica-0", B, timeout_s=1_500)
            assert [await ask(B) for _ in range(4)] == [answers[B]] * 4
            with pytest.raises(openai.InternalServerError, match="no worker serves the model"):
                await ask(A)
            await running.load_model("replica-1", A, timeout_s=1_500)
            assert (await ask(A), await ask(B)) == (answers[A], answers[B])
