"""Both phases of a request at once on simulated engines: what moves, who gives up, what is safe."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from schemas.log.clock import wall_ms
from schemas.prefix import chain
from schemas.records import KvHandle, Orchestration
from tests.waiting import run, until
from tests.workers.engines import (
    PREFILL,
    Answer,
    allocated,
    answered,
    collected,
    handed_over,
    job,
    paired,
    paired_jobs,
    peer_handle,
    prompt,
    start_sim,
)
from workers.kv.transfer import Direction, MemoryTransfer
from workers.llm.engine import Job
from workers.llm.sim_engine import SimEngine

CONCURRENT, DECODE_FIRST = Orchestration.CONCURRENT, Orchestration.DECODE_FIRST
PAIRED = pytest.mark.parametrize("orchestration", [CONCURRENT, DECODE_FIRST])
BLOCK_BYTES = 16 * 256
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs the package nixl")


def transfer_of(engine: SimEngine) -> MemoryTransfer:
    return MemoryTransfer.peers[engine.capability.engine_id]


def written(engine: SimEngine) -> list[int]:
    """How many blocks each of its writes moved."""
    moves = transfer_of(engine).moved
    return [len(move.local_blocks) for move in moves if move.direction is Direction.WRITE]


async def closed(*engines: SimEngine) -> None:
    await until(lambda: not any(engine.blocks.used for engine in engines))
    for engine in engines:
        engine.blocks.check()
        assert engine.load().running == 0
        await engine.close()


async def target_of(
    producer: SimEngine, consumer: SimEngine, first: Job, second: Job
) -> tuple[Job, KvHandle]:
    """Allocate a decode_first job; the prefill job that it makes possible."""
    target = (await allocated(consumer, second)).kv
    assert target is not None
    return replace(first, kv_target=target), target


async def started(
    orchestration: Orchestration, producer: SimEngine, consumer: SimEngine, tokens: Sequence[int]
) -> tuple[Job, Job]:
    """Decode waits for its KV; prefill's job is made and not added."""
    first, second = paired_jobs(producer, consumer, tokens, orchestration)
    if orchestration is DECODE_FIRST:
        first, _ = await target_of(producer, consumer, first, second)
    else:
        consumer.add(second)
    assert consumer.load().extra["awaiting"] == 1
    return first, second


@PAIRED
def test_bytes_are_those_of_the_missing_blocks(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(100)
        _, decoded = await paired(producer, consumer, tokens, orchestration, max_tokens=14)
        assert written(producer) == [7]
        longer = [*tokens, *decoded.token_ids, *prompt(40, 1)]  # 112 of 154 tokens are there
        prefilled, again = await paired(producer, consumer, longer, orchestration)
        assert written(producer) == [7, 3]
        assert prefilled.last.kv_bytes == again.outputs[0].kv_bytes == 3 * BLOCK_BYTES
        assert prefilled.last.transfer_ms > 0
        assert again.outputs[0].cached_tokens == 112
        sent, received = producer.load().kv_bytes_sent, consumer.load().kv_bytes_received
        assert sent == received == 10 * BLOCK_BYTES
        await closed(producer, consumer)

    run(main())


@PAIRED
@pytest.mark.parametrize("tokens", [64, 65])
def test_nothing_is_written_where_nothing_is_missing(
    orchestration: Orchestration, tokens: int
) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        alone = await answered(consumer, job(prompt(tokens)))
        prefilled, decoded = await paired(producer, consumer, prompt(tokens), orchestration)
        assert decoded.token_ids == alone.token_ids
        assert prefilled.last.kv_bytes == (tokens - 64) * BLOCK_BYTES
        await closed(producer, consumer)

    run(main())


def test_decode_first_reads_what_only_decode_holds() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(100)
        await answered(consumer, job(tokens))
        for _ in range(2):  # the second time prefill has it too
            prefilled, _ = await paired(producer, consumer, tokens, DECODE_FIRST)
            assert prefilled.outputs[0].cached_tokens == 96
            assert producer.load().kv_bytes_received == 6 * BLOCK_BYTES
            assert consumer.load().kv_bytes_sent == 6 * BLOCK_BYTES
        await closed(producer, consumer)

    run(main())


def test_prefix_that_cannot_be_read_is_computed() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(transfer_tries_max=2), await start_sim()
        tokens = prompt(100)
        alone = await answered(consumer, job(tokens))
        transfer_of(producer).failing = 2
        prefilled, decoded = await paired(producer, consumer, tokens, DECODE_FIRST)
        assert prefilled.outputs[0].cached_tokens == 0
        assert decoded.token_ids == alone.token_ids
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_wrong_bytes_change_the_answer(orchestration: Orchestration) -> None:
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

    run(main())


async def until_written(producer: SimEngine, first: Job) -> Answer:
    """Add a prefill job and go on until its write is posted; the first token's answer."""
    producer.add(first)
    outputs = await producer.outputs()
    await until(lambda: producer.load().running == 1)
    return Answer(outputs)


@pytest.mark.parametrize("theirs", [1, 2, 4])
@pytest.mark.parametrize("ours", [1, 2, 4])
def test_tensor_parallel_degrees_may_differ(ours: int, theirs: int) -> None:
    async def main() -> None:
        producer = await start_sim(tensor_parallel=ours)
        consumer = await start_sim(tensor_parallel=theirs)
        assert producer.capability.tensor_parallel == ours
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

    run(main())


@needs_nixl
@pytest.mark.parametrize(("ours", "theirs"), [(4, 2), (1, 4)])
def test_tensor_parallel_degrees_may_differ_over_nixl(ours: int, theirs: int) -> None:
    async def main() -> None:
        producer = await start_sim(transfer="nixl", tensor_parallel=ours)
        consumer = await start_sim(transfer="nixl", tensor_parallel=theirs)
        for salt, orchestration in enumerate([CONCURRENT, DECODE_FIRST]):
            tokens = [*prompt(50, salt), *prompt(55, salt + 9)]
            await answered(consumer, job(tokens[:50]))
            _, decoded = await paired(producer, consumer, tokens, orchestration)
            consumer.blocks.forget_cached()
            assert decoded.token_ids == (await answered(consumer, job(tokens))).token_ids
            assert decoded.outputs[0].kv_bytes == 4 * BLOCK_BYTES
        await closed(producer, consumer)

    run(main())


def test_want_may_come_after_the_kv_was_computed() -> None:
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

    run(main())


def test_first_token_that_ends_the_answer_is_handed_over_all_the_same() -> None:
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

    run(main())


def test_prefill_that_nobody_asks_gives_up_and_a_late_want_hears_why() -> None:
    async def main() -> None:
        producer = await start_sim(handle_ttl_ms=30, handle_margin_ms=10)
        consumer = await start_sim()
        first, second = paired_jobs(producer, consumer, prompt(50), CONCURRENT)
        prefilled = await answered(producer, first)
        assert prefilled.error_code == "kv_unavailable"
        assert prefilled.last.error is not None
        assert prefilled.last.error.retriable
        assert producer.blocks.used == 0
        decoded = await answered(consumer, second)
        assert decoded.last.error == prefilled.last.error
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_promise_that_is_not_kept_expires_and_its_blocks_stay_out_of_use(
    orchestration: Orchestration,
) -> None:
    async def main() -> None:
        producer = await start_sim()
        consumer = await start_sim(
            handle_ttl_ms=40, handle_margin_ms=10, transfer_timeout_ms=60, running_max=2
        )
        transfer_of(consumer).failing = 100  # the peer is not told that it is unwanted
        _, second = await started(orchestration, producer, consumer, prompt(50))
        other = job(prompt(20, 3), max_tokens=200)
        busy = asyncio.ensure_future(collected(consumer, second, other, add=False))
        consumer.add(other)
        await until(lambda: consumer.load().extra["quarantined"] > 0)
        assert consumer.load().running == 1  # the batch went on
        decoded, plain = await busy
        assert decoded.error_code == "kv_unavailable"
        assert len(plain.token_ids) == 200
        await until(lambda: not consumer.load().extra["quarantined"])
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_target_that_has_expired_is_not_written_to(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer = await start_sim(prefill_base_ms=60)
        consumer = await start_sim(handle_ttl_ms=40, handle_margin_ms=10)
        first, second = await started(orchestration, producer, consumer, prompt(50))
        (prefilled,), (decoded,) = await asyncio.gather(
            collected(producer, first), collected(consumer, second, add=False)
        )
        assert prefilled.error_code == decoded.error_code == "kv_unavailable"
        assert written(producer) == []
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_peer_of_a_later_life_is_not_written_to(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(prefill_base_ms=20), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        producer.add(first)
        assert first.kv_target is not None
        producer.saw_worker(first.kv_target.worker_id, 2, "engine-of-its-next-life")
        (prefilled,) = await collected(producer, first, add=False)
        assert prefilled.last.error is not None
        assert "expected epoch 2" in prefilled.last.error.message
        assert written(producer) == []
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.last.error == prefilled.last.error
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_decode_whose_peer_is_replaced_ends_at_once(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer = await start_sim()
        consumer = await start_sim(
            handle_ttl_ms=200, handle_margin_ms=20, transfer_timeout_ms=50, transfer_tries_max=1
        )
        first, second = await started(orchestration, producer, consumer, prompt(50))
        await producer.close()
        assert second.kv is not None
        consumer.saw_worker(second.kv.worker_id, 2, "engine-of-its-next-life")
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.error_code == "kv_unavailable"
        assert consumer.blocks.used == 4  # nobody can say what the lost one still does
        again = replace(first, request_id="other.1", kv_target=None, phase=second.phase)
        again = replace(again, kv=replace(second.kv, engine_request_id="other.1"))
        assert (await answered(consumer, again)).error_code == "stale_epoch"
        await closed(consumer)

    run(main())


@PAIRED
def test_abort_of_decode_ends_prefill_and_frees_the_blocks(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(prefill_base_ms=100), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        producer.add(first)
        consumer.abort(second.request_id)
        assert consumer.blocks.used == 4
        (prefilled,) = await collected(producer, first, add=False)
        assert prefilled.error_code == "kv_unavailable"
        assert prefilled.token_ids == []  # it did not even compute on
        await until(lambda: not consumer.blocks.used)  # confirmed long before it would expire
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_decode_that_gave_up_before_prefill_came_is_not_written_to(
    orchestration: Orchestration,
) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        consumer.abort(second.request_id)
        await until(lambda: not consumer.blocks.used)
        prefilled = await answered(producer, first)
        assert prefilled.error_code == "kv_unavailable"
        assert written(producer) == []
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_blocks_of_a_write_under_way_stay_out_of_use_on_both_sides(
    orchestration: Orchestration,
) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        transfer_of(producer).stalled = True
        await until_written(producer, first)
        consumer.abort(second.request_id)
        producer.abort(first.request_id)
        ends = await asyncio.gather(
            collected(producer, first, add=False), collected(consumer, second, add=False)
        )
        assert [end.last.finish_reason for (end,) in ends] == ["abort", "abort"]
        assert producer.load().running == consumer.load().running == 0
        assert (producer.blocks.used, consumer.blocks.used) == (4, 4)
        producer.blocks.forget_cached()
        consumer.blocks.forget_cached()
        assert (await answered(consumer, job(prompt(60, 4)))).last.finish_reason == "length"
        assert (producer.blocks.used, consumer.blocks.used) == (4, 4)
        transfer_of(producer).stalled = False
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_abort_of_prefill_alone_leaves_decode_to_its_own_cancellation(
    orchestration: Orchestration,
) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(prefill_base_ms=50), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        producer.add(first)
        producer.abort(first.request_id)
        (prefilled,) = await collected(producer, first, add=False)
        assert prefilled.last.finish_reason == "abort"
        assert consumer.load().running == 1
        await until(lambda: not transfer_of(consumer).notices)
        consumer.abort(second.request_id)
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.last.finish_reason == "abort"
        await closed(producer, consumer)

    run(main())


@PAIRED
@pytest.mark.parametrize("failures", [2, 8])
def test_write_that_fails_is_tried_again_with_pauses_and_then_both_end(
    orchestration: Orchestration, failures: int
) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        transfer_of(producer).stalled = True
        await until_written(producer, first)
        transfer_of(producer).failing, transfer_of(producer).stalled = failures, False
        (prefilled,) = await collected(producer, first, add=False)
        transfer_of(producer).failing = 0
        (decoded,) = await collected(consumer, second, add=False)
        if failures == 2:
            assert prefilled.last.finish_reason == "handover"
            assert len(decoded.token_ids) == 12
        else:
            assert prefilled.error_code == "kv_unavailable"
            assert decoded.last.error == prefilled.last.error
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_late_write_ends_prefill_and_its_blocks_wait(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(transfer_timeout_ms=10), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        transfer_of(producer).stalled = True
        (prefilled,) = await collected(producer, first)
        assert prefilled.error_code == "kv_unavailable"
        assert (producer.load().running, producer.blocks.used) == (0, 4)
        transfer_of(producer).stalled = False  # it is written after all, so decode goes on
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.token_ids == (await answered(producer, job(prompt(50)))).token_ids
        await closed(producer, consumer)

    run(main())


@PAIRED
def test_places_of_the_batch_are_kept_and_neighbours_go_on(orchestration: Orchestration) -> None:
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

    run(main())


def test_two_engines_that_wait_for_each_other_go_on() -> None:
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
            work[at].sort(key=lambda each: each.phase is PREFILL)
        ends = await asyncio.gather(*(collected(engines[at], *work[at]) for at in (0, 1)))
        reasons = [answer.last.finish_reason for answers in ends for answer in answers]
        assert sorted(reasons) == ["handover"] * 12 + ["length"] * 12
        await closed(*engines)

    run(main())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": 49}, "kv_unavailable"),
        ({"block_ids": (1,)}, "kv_unavailable"),
        ({"block_size": 8}, "kv_unavailable"),
        ({"expires_at_ms": 1}, "kv_unavailable"),
        ({"engine_request_id": "another"}, "kv_unavailable"),
    ],
)
def test_promise_that_does_not_fit_is_refused_and_prefill_hears_of_it(
    change: dict[str, Any], code: str
) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = paired_jobs(producer, consumer, prompt(50), CONCURRENT)
        assert second.kv is not None
        decoded = await answered(consumer, replace(second, kv=replace(second.kv, **change)))
        assert decoded.error_code == code
        assert (await answered(producer, first)).error_code == "kv_unavailable"
        await closed(producer, consumer)

    run(main())


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 17},
        {"tokens": 64},
        {"block_ids": (1,)},
        {"block_ids": ()},
        {"block_size": 8},
        {"expires_at_ms": 1},
        {"engine_request_id": "another"},
    ],
)
def test_target_that_does_not_fit_is_refused_and_decode_hears_of_it(change: dict[str, Any]) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = paired_jobs(producer, consumer, prompt(50), DECODE_FIRST)
        first, target = await target_of(producer, consumer, first, second)
        prefilled = await answered(producer, replace(first, kv_target=replace(target, **change)))
        assert prefilled.error_code == "kv_unavailable"
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.last.error == prefilled.last.error
        await closed(producer, consumer)

    run(main())


def test_paired_job_needs_a_peer_and_not_itself() -> None:
    async def main() -> None:
        engine, alone = await start_sim(), await start_sim(transfer="none")
        missing = job(prompt(50), orchestration=CONCURRENT)
        assert (await answered(engine, missing)).error_code == "kv_unavailable"
        own = peer_handle(engine, "request.1", 50)
        itself = job(prompt(50), request_id="request.1", kv=own, orchestration=CONCURRENT)
        assert (await answered(engine, itself)).error_code == "kv_unavailable"
        assert alone.capability.orchestrations == ()
        _, second = paired_jobs(engine, alone, prompt(50), CONCURRENT)
        assert (await answered(alone, second)).error_code == "kv_unavailable"
        await closed(engine, alone)

    run(main())


def test_deadline_of_a_waiting_decode_is_kept() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        _, second = paired_jobs(producer, consumer, prompt(50), CONCURRENT)
        late = replace(second, deadline_ms=wall_ms() + 20)
        assert (await answered(consumer, late)).error_code == "deadline_exceeded"
        await closed(producer, consumer)

    run(main())


def test_peers_are_connected_when_they_are_discovered() -> None:
    async def main() -> None:
        cards: dict[str, bytes] = {}
        producer, consumer = [await start_sim(peer_metadata=cards.get) for _ in "ab"]
        plain = await start_sim(peer_metadata=cards.get, warm_up=False)
        for engine in (producer, consumer, plain):
            cards[engine.capability.engine_id] = engine.capability.nixl_metadata
        for engine in (producer, plain):
            engine.saw_worker("worker", 1, consumer.capability.engine_id)
        await until(lambda: len(transfer_of(producer).moved) == 1)
        (move,) = transfer_of(producer).moved
        assert (move.engine_id, move.notice) == (consumer.capability.engine_id, b"")
        assert not transfer_of(plain).moved
        await closed(producer, consumer, plain)

    run(main())


def test_block_log_names_what_the_prefix_cache_holds() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        tokens = prompt(50)
        _, decoded = await paired(producer, consumer, tokens, CONCURRENT, max_tokens=40)
        whole = [*tokens, *decoded.token_ids]
        assert consumer.block_log.held() == chain(whole, 16).tolist()[:5]
        assert producer.block_log.held() == chain(tokens, 16).tolist()
        consumer.blocks.forget_cached()
        assert consumer.block_log.held() == []
        await closed(producer, consumer)

    run(main())
