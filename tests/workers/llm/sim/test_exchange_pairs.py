"""Both phases of a request at once on simulated engines: what moves, and what waits for what."""

import asyncio
from importlib.util import find_spec
from typing import Any

import pytest

from schemas.prefix import chain
from schemas.records import Orchestration
from tests.virtual_time import run_virtual
from tests.waits import run, until
from tests.workers.llm.engines import (
    PREFILL,
    answered,
    collected,
    handed_over,
    job,
    paired,
    paired_jobs,
    prompt,
    start_sim,
    transfer_of,
)
from tests.workers.llm.sim.block_checks import drop_prefix_cache
from tests.workers.llm.sim.engine_pairs import (
    BLOCK_BYTES,
    CONCURRENT,
    DECODE_FIRST,
    PAIRED,
    closed,
    started,
    until_written,
    written,
)
from workers.llm.engine import Job  # noqa: TC001 - as everywhere in tests

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs the package nixl")


@PAIRED
def test_prefill_writes_missing_blocks_and_counts_bytes(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(100)
        _, decoded = await paired(producer, consumer, tokens, orchestration, max_tokens=14)
        assert written(producer) == [7]
        longer = [*tokens, *decoded.token_ids, *prompt(40, 1)]  # 112 of 154 tokens are there
        prefilled, next_answer = await paired(producer, consumer, longer, orchestration)
        assert written(producer) == [7, 3]
        assert prefilled.last.kv_bytes == next_answer.outputs[0].kv_bytes == 3 * BLOCK_BYTES
        assert prefilled.last.transfer_ms > 0
        assert next_answer.outputs[0].cached_tokens == 112
        bytes_sent, bytes_received = (
            producer.load().kv_bytes_sent,
            consumer.load().kv_bytes_received,
        )
        assert bytes_sent == bytes_received == 10 * BLOCK_BYTES
        await closed(producer, consumer)

    run_virtual(main())


@PAIRED
@pytest.mark.parametrize("tokens", [64, 65])
def test_prefill_skips_blocks_that_decode_has(orchestration: Orchestration, tokens: int) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        alone = await answered(consumer, job(prompt(tokens)))
        prefilled, decoded = await paired(producer, consumer, prompt(tokens), orchestration)
        assert decoded.token_ids == alone.token_ids
        assert prefilled.last.kv_bytes == (tokens - 64) * BLOCK_BYTES
        await closed(producer, consumer)

    run_virtual(main())


def test_decode_first_prefill_reads_blocks_of_decode() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(100)
        await answered(consumer, job(tokens))
        for read in (6, 0):  # the second time prefill has it too
            prefilled, _ = await paired(producer, consumer, tokens, DECODE_FIRST)
            assert prefilled.outputs[0].cached_tokens == 96
            assert prefilled.outputs[0].kv_bytes == read * BLOCK_BYTES
            assert producer.load().kv_bytes_received == 6 * BLOCK_BYTES
            assert consumer.load().kv_bytes_sent == 6 * BLOCK_BYTES
        await closed(producer, consumer)

    run_virtual(main())


def test_prefill_computes_unreadable_prefix() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(transfer_tries_max=2), await start_sim()
        tokens = prompt(100)
        alone = await answered(consumer, job(tokens))
        transfer_of(producer).failing = 2
        prefilled, decoded = await paired(producer, consumer, tokens, DECODE_FIRST)
        assert prefilled.outputs[0].cached_tokens == 0
        assert decoded.token_ids == alone.token_ids
        await closed(producer, consumer)

    run_virtual(main())


@PAIRED
def test_corrupt_bytes_change_answer(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim(kv_blocks=16)
        tokens = prompt(100)
        alone = await answered(producer, job(tokens))
        first, second = await started(orchestration, producer, consumer, tokens)
        transfer_of(producer).stalled = True
        prefilled = await until_written(producer, first)
        producer.exchange._arena.regions[:] += 1  # while the write is under way
        transfer_of(producer).stalled = False
        (decoded,) = await collected(consumer, second, add=False)
        assert prefilled.token_ids == alone.token_ids[:1]
        assert decoded.token_ids != alone.token_ids
        for engine in (producer, consumer):
            await engine.close()

    run_virtual(main())


@pytest.mark.parametrize("consumer_degree", [1, 2, 4])
@pytest.mark.parametrize("producer_degree", [1, 2, 4])
def test_engines_pair_across_tensor_parallel_degrees(
    producer_degree: int, consumer_degree: int
) -> None:
    async def main() -> None:
        producer = await start_sim(tensor_parallel=producer_degree)
        consumer = await start_sim(tensor_parallel=consumer_degree)
        assert producer.capability.tensor_parallel == producer_degree
        assert producer.capability.kv_layout == consumer.capability.kv_layout
        alone = await start_sim()
        for salt, orchestration in enumerate([CONCURRENT, DECODE_FIRST]):
            shared, tokens = prompt(50, salt), [*prompt(50, salt), *prompt(55, salt + 9)]
            await answered(consumer, job(shared))
            _, decoded = await paired(producer, consumer, tokens, orchestration)
            expected = await answered(alone, job(tokens))
            assert decoded.token_ids == expected.token_ids
            assert decoded.outputs[0].kv_bytes == 4 * BLOCK_BYTES
        _, pulled = await handed_over(producer, consumer, prompt(70, 5))
        assert pulled.token_ids == (await answered(alone, job(prompt(70, 5)))).token_ids
        assert pulled.outputs[0].kv_bytes == 5 * BLOCK_BYTES
        await closed(producer, consumer, alone)

    run_virtual(main())


@needs_nixl
@pytest.mark.parametrize(("producer_degree", "consumer_degree"), [(4, 2), (1, 4)])
def test_engines_pair_across_tensor_parallel_degrees_over_nixl(
    producer_degree: int, consumer_degree: int
) -> None:
    async def main() -> None:
        producer = await start_sim(transfer="nixl", tensor_parallel=producer_degree)
        consumer = await start_sim(transfer="nixl", tensor_parallel=consumer_degree)
        for salt, orchestration in enumerate([CONCURRENT, DECODE_FIRST]):
            tokens = [*prompt(50, salt), *prompt(55, salt + 9)]
            await answered(consumer, job(tokens[:50]))
            _, decoded = await paired(producer, consumer, tokens, orchestration)
            drop_prefix_cache(consumer.blocks)
            assert decoded.token_ids == (await answered(consumer, job(tokens))).token_ids
            assert decoded.outputs[0].kv_bytes == 4 * BLOCK_BYTES
        await closed(producer, consumer)

    run(main())


def test_prefill_waits_for_late_want() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = paired_jobs(producer, consumer, prompt(50), CONCURRENT)
        producer.add(first)
        (output,) = await producer.outputs()
        assert len(output.token_ids) == 1
        assert producer.load().running == 0  # it takes no place while it waits
        assert producer.load().extra["pushing"] == 1
        (decoded,), (prefilled,) = await asyncio.gather(
            collected(consumer, second), collected(producer, first, add=False)
        )
        assert prefilled.last.finish_reason == "handover"
        assert decoded.token_ids == (await answered(producer, job(prompt(50)))).token_ids
        await closed(producer, consumer)

    run_virtual(main())


def test_prefill_hands_over_first_token_that_ends_answer() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        (stop,) = (await answered(producer, job(prompt(50), max_tokens=1))).token_ids
        prefilled, decoded = await paired(
            producer, consumer, prompt(50), CONCURRENT, stop_token_ids=(stop,)
        )
        assert [output.finish_reason for output in prefilled.outputs] == ["", "handover"]
        assert prefilled.token_ids == decoded.token_ids == [stop]
        assert decoded.last.finish_reason == "stop"
        await closed(producer, consumer)

    run_virtual(main())


@PAIRED
def test_paired_jobs_leave_batch_place_for_plain_job(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim(running_max=3)
        plain = job(prompt(20, 7), max_tokens=300)
        pairs = [paired_jobs(producer, consumer, prompt(40, i), orchestration) for i in range(4)]
        for _, second in pairs:
            consumer.add(second)
        consumer.add(plain)
        load = consumer.load()
        assert load.running == 3
        assert load.extra["awaiting"] == 2  # one place is left for what needs no peer
        (answer,) = await collected(consumer, plain, add=False)
        assert len(answer.token_ids) == 300
        for _, second in pairs:
            consumer.abort(second.request_id)
        await closed(producer, consumer)

    run_virtual(main())


def test_opposite_pairs_do_not_deadlock() -> None:
    async def main() -> None:
        small: dict[str, Any] = {"running_max": 2, "prefill_running_max": 1}
        engines = [await start_sim(**small), await start_sim(**small)]
        jobs = [
            paired_jobs(engines[i % 2], engines[1 - i % 2], prompt(40, i), CONCURRENT)
            for i in range(12)
        ]
        work: list[list[Job]] = [[], []]
        for i, (first, second) in enumerate(jobs):
            work[1 - i % 2].append(second)  # all decodes come first
            work[i % 2].append(first)
        for at in (0, 1):
            work[at].sort(key=lambda queued_job: queued_job.phase is PREFILL)
        ends = await asyncio.gather(*(collected(engines[at], *work[at]) for at in (0, 1)))
        reasons = [answer.last.finish_reason for answers in ends for answer in answers]
        assert sorted(reasons) == ["handover"] * 12 + ["length"] * 12
        await closed(*engines)

    run_virtual(main())


def test_engine_connects_to_discovered_peer() -> None:
    async def main() -> None:
        cards: dict[str, bytes] = {}
        producer, consumer = [await start_sim(peer_metadata=cards.get) for _ in "ab"]
        for engine in (producer, consumer):
            cards[engine.capability.engine_id] = engine.capability.nixl_metadata
        producer.observe_worker("worker", 1, consumer.capability.engine_id)
        await until(lambda: len(transfer_of(producer).moved) == 1)
        (move,) = transfer_of(producer).moved
        assert (move.engine_id, move.notice) == (consumer.capability.engine_id, b"")
        await closed(producer, consumer)

    run_virtual(main())


def test_block_log_matches_prefix_cache() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(50)
        _, decoded = await paired(producer, consumer, tokens, CONCURRENT, max_tokens=40)
        whole = [*tokens, *decoded.token_ids]
        assert consumer.block_log.snapshot() == chain(whole, 16).tolist()[:5]
        assert producer.block_log.snapshot() == chain(tokens, 16).tolist()
        drop_prefix_cache(consumer.blocks)
        assert consumer.block_log.snapshot() == []
        await closed(producer, consumer)

    run_virtual(main())
