"""The simulated engine's own: times, bounds, ends of answers, and KV that does not arrive."""

import asyncio
from typing import Any

import pytest

from schemas.records import KvHandle
from tests.virtual import run_virtual
from tests.waiting import pass_time, until
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
    start_s, found = loop.time(), []
    for _ in range(count):
        outputs = await engine.outputs()
        found.append((round((loop.time() - start_s) * 1_000, 3), outputs))
    return found


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


def test_times_are_those_of_the_profile() -> None:
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


def test_step_grows_with_the_batch_and_prefills() -> None:
    settings = SimSettings(decode_step_ms=5, decode_ms_per_request=0.5, prefill_interference=0.2)
    assert settings.step_s(10, 0) == pytest.approx(0.010)
    assert settings.step_s(10, 1) == pytest.approx(0.012)


def test_first_token_does_not_wait_for_the_step_and_all_rows_advance_together() -> None:
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


def test_prefills_run_as_many_at_once_as_set() -> None:
    async def main() -> None:
        engine = await start_sim(prefill_base_ms=10, prefill_running_max=2)
        for salt in range(4):
            engine.add(job(prompt(20, salt), max_tokens=1))
        times = [at_ms for at_ms, _ in await timed(engine, 4)]
        assert times == pytest.approx([10, 10, 20, 20])
        await closed(engine)

    run_virtual(main())


def test_steps_pause_when_nobody_collects() -> None:
    async def main() -> None:
        engine = await start_sim(backlog_steps_max=5)
        engine.add(job(prompt(20), max_tokens=500))
        await pass_time(0.2)
        assert engine.load().tokens_total <= 6
        await engine.close()

    run_virtual(main())


def test_running_never_exceeds_its_bound() -> None:
    async def main() -> None:
        engine = await start_sim(running_max=3)
        jobs = [job(prompt(20, salt), max_tokens=6) for salt in range(9)]
        for each in jobs:
            engine.add(each)
        assert (engine.load().running, engine.load().waiting) == (3, 6)
        most, open_ids = 0, {each.request_id for each in jobs}
        while open_ids:
            outputs = await engine.outputs()
            open_ids -= {out.request_id for out in outputs if out.finish_reason}
            most = max(most, engine.load().running)
        assert most == 3
        await closed(engine)

    run_virtual(main())


def test_full_queue_refuses() -> None:
    async def main() -> None:
        engine = await start_sim(running_max=1, waiting_max=2)
        jobs = [job(prompt(20, salt)) for salt in range(4)]
        answers = await collected(engine, *jobs)
        assert [answer.error_code for answer in answers] == ["", "", "", "worker_refused"]
        await closed(engine)

    run_virtual(main())


def test_memory_that_is_full_makes_wait_and_evicts() -> None:
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


def test_repeated_job_is_ignored() -> None:
    async def main() -> None:
        engine = await start_sim()
        one = job(prompt(20))
        engine.add(one)
        (answer,) = await collected(engine, one)
        assert len(answer.token_ids) == 12
        await closed(engine)

    run_virtual(main())


def test_answers_end_by_themselves() -> None:
    async def main() -> None:
        engine = await start_sim(end_every_tokens=8)
        free: dict[str, Any] = {"max_tokens": 400, "ignore_eos": False}
        jobs = [job(prompt(20, salt), **free) for salt in range(20)]
        answers = await collected(engine, *jobs)
        lengths = [len(answer.token_ids) for answer in answers]
        assert all(answer.last.finish_reason == "stop" for answer in answers)
        assert 2 < sum(lengths) / len(lengths) < 20
        assert all(answer.last.text == "" and answer.last.token_ids for answer in answers)
        held = await answered(engine, job(prompt(20), **{**free, "min_tokens": 60}))
        assert len(held.token_ids) > 60
        ignored = await answered(engine, job(prompt(20), max_tokens=60))
        assert (len(ignored.token_ids), ignored.last.finish_reason) == (60, "length")
        await closed(engine)

    run_virtual(main())


def test_answers_have_the_length_that_a_benchmark_asks_for() -> None:
    async def main() -> None:
        engine = await start_sim(answer_tokens=5)
        answer = await answered(engine, job(prompt(20), ignore_eos=False))
        assert (len(answer.token_ids), answer.last.finish_reason) == (5, "stop")
        short = await answered(engine, job(prompt(20), ignore_eos=False, max_tokens=3))
        assert (len(short.token_ids), short.last.finish_reason) == (3, "length")
        await closed(engine)

    run_virtual(main())


def test_length_of_the_model_bounds_the_answer() -> None:
    async def main() -> None:
        engine = await start_sim(max_model_len=30)
        answer = await answered(engine, job(prompt(20), max_tokens=500))
        assert (len(answer.token_ids), answer.last.finish_reason) == (10, "length")
        await closed(engine)

    run_virtual(main())


def test_seen_later_epoch_refuses_the_earlier_one() -> None:
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
        again = await prefilled(new, tokens)
        assert (await answered(consumer, job(tokens, kv=again))).error_code == "stale_epoch"
        for engine in (old, new, consumer):
            await engine.close()

    run_virtual(main())


def test_fetch_that_fails_once_is_tried_again_and_twice_is_recomputed() -> None:
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


def test_producer_that_is_gone_means_recomputing() -> None:
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


def test_wrong_bytes_change_the_answer() -> None:
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


def test_late_fetch_holds_nothing_up_and_its_blocks_stay_out_of_use() -> None:
    async def main() -> None:
        producer = await start_sim()
        consumer = await start_sim(transfer_timeout_ms=20, running_max=2)
        transfer, tokens = transfer_of(consumer), prompt(50)
        transfer.stalled = True
        kv = await prefilled(producer, tokens)
        late, other = job(tokens, kv=kv), job(prompt(30, 5), max_tokens=10)
        consumer.add(late)
        assert consumer.load().running == 1
        answers = await collected(consumer, other, late)
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
def test_request_that_ends_while_fetching_frees_its_blocks_once_they_are_safe(how: str) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        transfer, tokens = transfer_of(consumer), prompt(50)
        transfer.stalled = True
        kv = await prefilled(producer, tokens)
        one = job(tokens, kv=kv, timeout_ms=30)
        consumer.add(one)
        if how == "abort":
            consumer.abort(one.request_id)
        answer = (await collected(consumer, one, add=False))[0]
        assert answer.last.finish_reason == ("abort" if how == "abort" else "error")
        assert consumer.load().running == 0
        assert consumer.blocks.used == len(kv.block_ids)
        transfer.stalled = False
        await until(lambda: not consumer.blocks.used)
        await closed(consumer)
        await producer.close()

    run_virtual(main())


def test_handle_expires_and_frees_its_blocks() -> None:
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


def test_read_handle_is_released_and_counted_on_both_sides() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        await handed_over(producer, consumer, prompt(50))
        await until(lambda: not producer.blocks.used)
        sent, received = producer.load().kv_bytes_sent, consumer.load().kv_bytes_received
        assert sent == received == 4 * 16 * 256
        assert producer.load().kv_handles_held == 0
        await closed(producer, consumer)

    run_virtual(main())


def test_aborted_prefill_gives_its_held_blocks_up() -> None:
    async def main() -> None:
        producer = await start_sim()
        one = job(prompt(50), PREFILL)
        await answered(producer, one)
        assert producer.blocks.used == 4
        producer.abort(one.request_id)
        await closed(producer)

    run_virtual(main())


@pytest.mark.parametrize("tokens", [48, 50])
def test_handle_of_the_same_engine_needs_no_transfer(tokens: int) -> None:
    async def main() -> None:
        engine = await start_sim(transfer="none")
        _, decoded = await handed_over(engine, engine, prompt(tokens))
        assert decoded.token_ids == (await answered(engine, job(prompt(tokens)))).token_ids
        assert decoded.outputs[0].kv_bytes == 0
        await closed(engine)

    run_virtual(main())


def test_metadata_can_come_from_elsewhere() -> None:
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


def test_bug_in_a_timer_ends_the_engine() -> None:
    async def main() -> None:
        engine = await start_sim()
        engine.add(job(prompt(50)))
        check_blocks(engine.blocks)
        engine._arena.write = None  # type: ignore[method-assign,assignment]
        with pytest.raises(Exception, match="not callable"):
            await until_ended(engine, {"nobody"})
        await engine.close()

    run_virtual(main())
