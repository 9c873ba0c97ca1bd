"""One engine alone: its answers, however many are asked for at once."""

from collections.abc import AsyncIterator

import pytest

from infra.stack.engine_alone import generate_answers
from infra.stack.engine_source import start_engine
from schemas.errors import EngineFailed
from schemas.records import Role, Sampling
from schemas.settings import ModelSettings
from workers.llm.engine import Engine
from workers.models.sim import make_sim_model

QUICK = {"decode_step_ms": 0.1, "prefill_base_ms": 0.1, "transfer": "none", "end_every_tokens": 0}
ASKED = [([5 + n] * 9, Sampling(max_tokens=3 + n)) for n in range(5)]


@pytest.fixture
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    model = make_sim_model(tmp_path_factory.mktemp("model") / "sim")
    new_engine = await start_engine(
        "sim",
        QUICK,
        model=ModelSettings(path=str(model), name="sim"),
        roles=[Role.REPLICA],
        worker_id="alone",
        worker_epoch=1,
    )
    yield new_engine
    await new_engine.close()


async def test_engine_alone_answers_do_not_depend_on_concurrency(engine: Engine) -> None:
    answer_calls: list[None] = []
    one_by_one = await generate_answers(
        engine, ASKED, at_once=1, on_answer=lambda: answer_calls.append(None)
    )
    assert [len(answer.token_ids) for answer in one_by_one] == [3, 4, 5, 6, 7]
    assert len(answer_calls) == 5 and all(answer.text for answer in one_by_one)
    assert await generate_answers(engine, ASKED, at_once=2) == one_by_one
    assert await generate_answers(engine, ASKED, at_once=64) == one_by_one
    assert await generate_answers(engine, [], at_once=2) == []


async def test_engine_alone_raises_refusal(engine: Engine) -> None:
    with pytest.raises(EngineFailed, match="the engine alone: "):
        await generate_answers(engine, [([5] * 100_000, Sampling(max_tokens=2))], at_once=1)
