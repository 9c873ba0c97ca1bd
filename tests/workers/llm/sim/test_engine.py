"""The simulated engine's own: times, bounds, ends of answers, and KV that does not arrive."""

import asyncio
from typing import Any

import pytest

from schemas.records import KvHandle
from tests.virtual_time import run_virtual
from tests.waits import pass_time, until
from tests.workers.llm.engines import (
    PREFILL,
    answered,
    collected,
    handed_over,
    job,
    prompt,
    start_sim,
    transfer_of,
)
from tests.workers.llm.sim.block_checks import check_blocks, drop_prefix_cache
from workers.llm.engine import Output
from workers.llm.sim.engine import SimEngine
from workers.llm.sim.settings import SimSettings


async def timed(engine: SimEngine, count: int) -> list[tuple[float, list[Output]]]:
    """The next lists of outputs, each with the milliseconds since now."""
    loop = asyncio.get_running_loop()
    start_s, timed_outputs = loop.time(), []
    for _ in range(count):
        outputs = await engine.outputs()
        timed_outputs.append((round((loop.time() - start_s) * 1_000, 3), outputs))
    return timed_outputs


async def until_ended(engine: SimEngine, request_ids: set[str]) -> None:
    while request_ids:
        request_ids -= {out.request_id for out in await engine.outputs() if out.finish_reason}


async def prefilled(producer: SimEngine, tokens: list[int]) -> KvHandle:
    kv = (await answered(producer, job(tokens, PREFILL))).last.kv
    assert kv is not None
    return kv


async def closed(*engines: SimEngine) -> None:
    for engine in engines:
        assert engine.blocks.used == 0
        check_blocks(engine.blocks)
        await engine.close()


def test_engine_follows_latency_profile() -> None:
    async def main() -> None:
        engine = await start_sim(prefill_base_ms=20, decode_step_ms=5)
        engine.add(job(prompt(30), max_tokens=4))
        times = [at_ms for at_ms, _ in await timed(engine, 4)]
        assert times == pytest.approx([20, 25, 30, 35])
        await closed(engine)

    run_virtual(main())


def test_prefill_time_grows_with_uncached_tokens() -> None:
    async def main() -> None:
        profile = {"prefill_base_ms": 10, "prefill_ms_per_token": 1, "append_ms_per_token": 2}
        engine = await start_sim(**profile)
        engine.add(job(prompt(64), max_tokens=1))
        assert (await timed(engine, 1))[0][0] == pytest.approx(74)
        engine.add(job(prompt(64), max_tokens=1))  # 48 of them are cached
        ((at_ms, (output,)),) = await timed(engine, 1)
        assert at_ms == pytest.approx(10 + 2 * 16)
        assert output.cached_tokens == 48
        await closed(engine)

    run_virtual(main())


def test_step_time_grows_with_batch_and_prefills() -> None:
    settings = SimSettings(decode_step_ms=5, decode_ms_per_request=0.5, prefill_interference=0.2)
    assert settings.step_s(10, 0) == pytest.approx(0.010)
    assert settings.step_s(10, 1) == pytest.approx(0.012)


def test_first_token_skips_step_and_rows_advance_together() -> None:
    async def main() -> None:
        engine = await start_sim(prefill_base_ms=1, decode_step_ms=50)
        engine.add(job(prompt(20), max_tokens=50))
        await timed(engine, 1)
        engine.add(job(prompt(21), max_tokens=50))
        (first_ms, first), (_, second) = await timed(engine, 2)
        assert first_ms == pytest.approx(1)
        assert len(first) == 1
        assert len(second) == 2  # one list per step
        await engine.close()

    run_virtual(main())


def test_engine_limits_concurrent_prefills() -> None:
    async def main() -> None:
        engine = await start_sim(prefill_base_ms=10, prefill_running_max=2)
        for salt in range(4):
            engine.add(job(prompt(20, salt), max_tokens=1))
        times = [at_ms for at_ms, _ in await timed(engine, 4)]
        assert times == pytest.approx([10, 10, 20, 20])
        await closed(engine)

    run_virtual(main())


def test_engine_pauses_steps_without_collector() -> None:
    async def main() -> None:
        engine = await start_sim()
        engine.add(job(prompt(20), max_tokens=500))
        await pass_time(0.2)
        assert engine.load().tokens_total <= 65
        await engine.close()

    run_virtual(main())


def test_engine_limits_running_requests() -> None:
    async def main() -> None:
        engine = await start_sim(running_max=3)
        jobs = [job(prompt(20, salt), max_tokens=6) for salt in range(9)]
        for queued_job in jobs:
            engine.add(queued_job)
        assert (engine.load().running, engine.load().waiting) == (3, 6)
        running_peak, open_ids = 0, {queued_job.request_id for queued_job in jobs}
        while open_ids:
            outputs = await engine.outputs()
            open_ids -= {out.request_id for out in outputs if out.finish_reason}
            running_peak = max(running_peak, engine.load().running)
        assert running_peak == 3
        await closed(engine)

    run_virtual(main())


def test_full_queue_refuses_job() -> None:
    async def main() -> None:
        engine = await start_sim(running_max=1, waiting_max=2)
        jobs = [job(prompt(20, salt)) for salt in range(4)]
        answers = await collected(engine, *jobs)
        assert [answer.error_code for answer in answers] == ["", "", "", "worker_refused"]
        await closed(engine)

    run_virtual(main())


def test_full_memory_delays_requests_and_evicts_blocks() -> None:
    async def main() -> None:
        engine = await start_sim(kv_blocks=8)
        jobs = [job(prompt(60, salt), max_tokens=30) for salt in range(5)]
        answers = await collected(engine, *jobs)
        assert all(answer.last.finish_reason == "length" for answer in answers)
        assert engine.load().extra["evictions_total"] > 0
        too_long = await answered(engine, job(prompt(120), max_tokens=30))
        assert too_long.error_code == "context_length_exceeded"
        await closed(engine)

    run_virtual(main())


def test_engine_ignores_repeated_job() -> None:
    async def main() -> None:
        engine = await start_sim()
        repeated_job = job(prompt(20))
        engine.add(repeated_job)
        (answer,) = await collected(engine, repeated_job)
        assert len(answer.token_ids) == 12
        await closed(engine)

    run_virtual(main())


def test_answers_stop_at_sampled_end() -> None:
    async def main() -> None:
        engine = await start_sim(end_every_tokens=8)
        free: dict[str, Any] = {"max_tokens": 400, "ignore_eos": False}
        jobs = [job(prompt(20, salt), **free) for salt in range(20)]
        answers = await collected(engine, *jobs)
        lengths = [len(answer.token_ids) for answer in answers]
        assert all(answer.last.finish_reason == "stop" for answer in answers)
        assert 2 < sum(lengths) / len(lengths) < 20
        assert all(answer.last.text == "" and answer.last.token_ids for answer in answers)
        long_answer = await answered(engine, job(prompt(20), **{**free, "min_tokens": 60}))
        assert len(long_answer.token_ids) > 60
        ignored = await answered(engine, job(prompt(20), max_tokens=60))
        assert (len(ignored.token_ids), ignored.last.finish_reason) == (60, "length")
        await closed(engine)

    run_virtual(main())


def test_answer_tokens_setting_fixes_answer_length() -> None:
    async def main() -> None:
        engine = await start_sim(answer_tokens=5)
        answer = await answered(engine, job(prompt(20), ignore_eos=False))
        assert (len(answer.token_ids), answer.last.finish_reason) == (5, "stop")
        short = await answered(engine, job(prompt(20), ignore_eos=False, max_tokens=3))
        assert (len(short.token_ids), short.last.finish_reason) == (3, "length")
        await closed(engine)

    run_virtual(main())


def test_model_length_bounds_answer() -> None:
    async def main() -> None:
        engine = await start_sim(max_model_len=30)
        answer = await answered(engine, job(prompt(20), max_tokens=500))
        assert (len(answer.token_ids), answer.last.finish_reason) == (10, "length")
        await closed(engine)

    run_virtual(main())


def test_engine_refuses_handle_of_earlier_epoch() -> None:
    async def main() -> None:
        old = await start_sim(worker_id="producer", worker_epoch=1)
        new = await start_sim(worker_id="producer", worker_epoch=2)
        consumer = await start_sim()
        tokens = prompt(40)
        kv = await prefilled(old, tokens)
        await handed_over(new, consumer, prompt(40, 1))
        answer = await answered(consumer, job(tokens, kv=kv))
        assert answer.error_code == "stale_epoch"
        consumer.observe_worker("producer", 3, "engine-later")
        new_kv = await prefilled(new, tokens)
        assert (await answered(consumer, job(tokens, kv=new_kv))).error_code == "stale_epoch"
        for engine in (old, new, consumer):
            await engine.close()

    run_virtual(main())


def test_fetch_retries_once_then_recomputes_prompt() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim(transfer_tries_max=2)
        for failures, recomputed in ((1, 0), (2, 1)):
            tokens = prompt(50, failures)
            transfer_of(consumer).failing = failures
            _, decoded = await handed_over(producer, consumer, tokens)
            alone = await answered(producer, job(tokens))
            assert decoded.token_ids == alone.token_ids
            assert (decoded.outputs[0].kv_bytes == 0) == bool(recomputed)
            assert consumer.load().extra["recomputed_total"] == recomputed
        await closed(consumer)
        await producer.close()

    run_virtual(main())


def test_consumer_recomputes_prompt_of_closed_producer() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(50)
        alone = await answered(consumer, job(tokens))
        drop_prefix_cache(consumer.blocks)
        kv = await prefilled(producer, tokens)
        await producer.close()
        answer = await answered(consumer, job(tokens, kv=kv))
        assert answer.token_ids == alone.token_ids
        assert answer.outputs[0].kv_bytes == 0
        await closed(consumer)

    run_virtual(main())


def test_corrupt_bytes_change_answer() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(50)
        alone = await answered(consumer, job(tokens))
        drop_prefix_cache(consumer.blocks)
        kv = await prefilled(producer, tokens)
        transfer_of(producer).regions[0, kv.block_ids[1], 3] += 1
        answer = await answered(consumer, job(tokens, kv=kv))
        assert answer.token_ids != alone.token_ids
        for engine in (producer, consumer):
            await engine.close()

    run_virtual(main())


def test_late_fetch_recomputes_prompt_and_quarantines_blocks() -> None:
    async def main() -> None:
        producer = await start_sim()
        consumer = await start_sim(transfer_timeout_ms=20, running_max=2)
        transfer, tokens = transfer_of(consumer), prompt(50)
        transfer.stalled = True
        kv = await prefilled(producer, tokens)
        late, neighbour = job(tokens, kv=kv), job(prompt(30, 5), max_tokens=10)
        consumer.add(late)
        assert consumer.load().running == 1
        answers = await collected(consumer, neighbour, late)
        assert len(answers[0].token_ids) == 10
        assert answers[1].token_ids == (await answered(producer, job(tokens))).token_ids
        assert consumer.load().extra["recomputed_total"] == 1
        assert consumer.blocks.used == len(kv.block_ids)  # may still be written to
        transfer.stalled = False
        await until(lambda: not consumer.blocks.used)
        await closed(consumer)
        await producer.close()

    run_virtual(main())


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_request_end_during_fetch_frees_blocks_after_transfer(how: str) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        transfer, tokens = transfer_of(consumer), prompt(50)
        transfer.stalled = True
        kv = await prefilled(producer, tokens)
        fetch_job = job(tokens, kv=kv, timeout_ms=30)
        consumer.add(fetch_job)
        if how == "abort":
            consumer.abort(fetch_job.request_id)
        answer = (await collected(consumer, fetch_job, add=False))[0]
        assert answer.last.finish_reason == ("abort" if how == "abort" else "error")
        assert consumer.load().running == 0
        assert consumer.blocks.used == len(kv.block_ids)
        transfer.stalled = False
        await until(lambda: not consumer.blocks.used)
        await closed(consumer)
        await producer.close()

    run_virtual(main())


def test_expired_handle_frees_blocks() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(handle_ttl_ms=30, handle_margin_ms=10), None
        kv = await prefilled(producer, prompt(50))
        assert producer.blocks.used == 4
        await until(lambda: not producer.blocks.used)
        assert producer.load().extra["handles_expired_total"] == 1
        consumer = await start_sim()
        answer = await answered(consumer, job(prompt(50), kv=kv))
        assert answer.error_code == "kv_unavailable"
        await closed(producer, consumer)

    run_virtual(main())


def test_hand_over_releases_handle_and_counts_bytes_on_both_sides() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        await handed_over(producer, consumer, prompt(50))
        await until(lambda: not producer.blocks.used)
        bytes_sent, bytes_received = (
            producer.load().kv_bytes_sent,
            consumer.load().kv_bytes_received,
        )
        assert bytes_sent == bytes_received == 4 * 16 * 256
        assert producer.load().kv_handles_held == 0
        await closed(producer, consumer)

    run_virtual(main())


def test_prefill_abort_frees_blocks_of_handle() -> None:
    async def main() -> None:
        producer = await start_sim()
        prefill_job = job(prompt(50), PREFILL)
        await answered(producer, prefill_job)
        assert producer.blocks.used == 4
        producer.abort(prefill_job.request_id)
        await closed(producer)

    run_virtual(main())


@pytest.mark.parametrize("tokens", [48, 50])
def test_handle_of_same_engine_needs_no_transfer(tokens: int) -> None:
    async def main() -> None:
        engine = await start_sim(transfer="none")
        _, decoded = await handed_over(engine, engine, prompt(tokens))
        assert decoded.token_ids == (await answered(engine, job(prompt(tokens)))).token_ids
        assert decoded.outputs[0].kv_bytes == 0
        await closed(engine)

    run_virtual(main())


def test_engine_gets_peer_metadata_from_lookup() -> None:
    async def main() -> None:
        cards: dict[str, bytes] = {}
        producer = await start_sim(peer_metadata=cards.get)
        consumer = await start_sim(peer_metadata=cards.get)
        cards[producer.capability.engine_id] = producer.capability.nixl_metadata
        first, decoded = await handed_over(producer, consumer, prompt(50))
        assert first.last.kv is not None
        assert first.last.kv.params == b""
        assert decoded.outputs[0].kv_bytes > 0
        await until(lambda: not producer.blocks.used)
        await closed(producer, consumer)

    run_virtual(main())


def test_timer_error_ends_engine() -> None:
    async def main() -> None:
        engine = await start_sim()
        engine.add(job(prompt(50)))
        check_blocks(engine.blocks)
        engine._arena.write = None  # type: ignore[method-assign,assignment]
        with pytest.raises(Exception, match="not callable"):
            await until_ended(engine, {"nobody"})
        await engine.close()

    run_virtual(main())
