"""Simulated adapters: how long a load takes, and which ones stay."""

import pytest

from tests.virtual_time import run_virtual
from tests.workers.llm.engines import answered, job, prompt, start_sim
from tests.workers.llm.sim.test_engine import timed
from workers.llm.sim.adapters import SimAdapters
from workers.llm.sim.run import start_value


def test_least_recently_used_adapter_leaves() -> None:
    adapters = SimAdapters(2, 1.0)
    assert adapters.loaded_s("b", 0.0) == 1.0
    assert adapters.loaded_s("a", 0.5) == 1.5
    assert adapters.loaded_s("b", 0.5) == 1.0, "it is being loaded"
    assert (adapters.names(0.9), adapters.names(1.2), adapters.names(2)) == ((), ("b",), ("a", "b"))
    assert adapters.loaded_s("b", 3.0) == 3.0
    assert adapters.loaded_s("c", 4.0) == 5.0
    assert adapters.names(5.0) == ("b", "c")
    assert adapters.loaded_s("a", 6.0) == 7.0
    assert adapters.loaded_s("", 6.0) == 6.0


def test_load_delays_first_use_only() -> None:
    async def main() -> None:
        engine = await start_sim(
            prefill_base_ms=20, decode_step_ms=5, adapters={"ada": "x"}, adapter_load_ms=50
        )
        for first_ms in (70, 20):
            engine.add(job(prompt(30), adapter="ada", max_tokens=2))
            times = [at_ms for at_ms, _ in await timed(engine, 2)]
            assert times == pytest.approx([first_ms, first_ms + 5])
        engine.add(job(prompt(30, salt=1), max_tokens=2))
        assert [at_ms for at_ms, _ in await timed(engine, 2)] == pytest.approx([20, 25])
        await engine.close()

    run_virtual(main())


def test_load_runs_while_kv_moves() -> None:
    """A decode job with KV waits for the rest of the load; a prefill job loads for itself."""

    async def main() -> None:
        fields = {"adapters": {"ada": "x"}, "prefill_base_ms": 20, "adapter_load_ms": 50}
        producer, consumer = await start_sim(**fields), await start_sim(**fields)
        first = job(prompt(300), phase=job(prompt(1)).phase.PREFILL, adapter="ada")
        kv = (await answered(producer, first)).last.kv
        consumer.add(job(prompt(300), request_id=first.request_id, kv=kv, adapter="ada"))
        (at_ms, (output,)), *_ = await timed(consumer, 1)
        assert at_ms == pytest.approx(50)
        assert output.kv_bytes
        assert consumer.load().adapters == ("ada",)
        consumer.abort(first.request_id)
        for engine in (producer, consumer):
            await engine.close()
            assert engine.blocks.used == 0

    run_virtual(main())


def test_abort_while_adapter_is_loaded_frees_everything() -> None:
    async def main() -> None:
        fields = {"adapters": {"ada": "x"}, "adapter_load_ms": 5_000}
        producer, consumer = await start_sim(**fields), await start_sim(**fields)
        first = job(prompt(300), phase=job(prompt(1)).phase.PREFILL, adapter="ada")
        kv = (await answered(producer, first)).last.kv
        second = job(
            prompt(300), request_id=first.request_id, kv=kv, adapter="ada", timeout_ms=1_000
        )
        answer = await answered(consumer, second)
        assert answer.error_code == "deadline_exceeded"
        assert consumer.load().running == 0
        for engine in (producer, consumer):
            assert engine.blocks.used == 0
            await engine.close()

    run_virtual(main())


def test_name_tells_answers_apart() -> None:
    assert start_value("sim", "") == 0
    values = {start_value("sim", "ada"), start_value("other", "ada"), start_value("other", "")}
    assert len(values) == 2, "the adapter's name alone counts"
    assert 0 not in values


async def test_models_of_other_names_answer_otherwise() -> None:
    engines = await start_sim(), await start_sim(name="other")
    answers = [await answered(engine, job(prompt(20))) for engine in engines]
    assert answers[0].token_ids != answers[1].token_ids
    for engine in engines:
        await engine.close()
