"""Both phases of a request at once on simulated engines: who gives up, and what is safe then."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Orchestration
from streams.log.clock import wall_ms
from tests.virtual_time import run_virtual
from tests.waits import until
from tests.workers.llm.engines import (
    answered,
    collected,
    job,
    paired_jobs,
    peer_handle,
    prompt,
    start_sim,
    transfer_of,
)
from tests.workers.llm.sim.block_checks import drop_prefix_cache
from tests.workers.llm.sim.engine_pairs import (
    CONCURRENT,
    DECODE_FIRST,
    PAIRED,
    closed,
    started,
    target_of,
    until_written,
    written,
)


def test_unwanted_prefill_expires_and_late_want_gets_its_error() -> None:
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

    run_virtual(main())


@PAIRED
def test_broken_promise_expires_and_quarantines_blocks(
    orchestration: Orchestration,
) -> None:
    async def main() -> None:
        producer = await start_sim()
        consumer = await start_sim(
            handle_ttl_ms=40, handle_margin_ms=10, transfer_timeout_ms=60, running_max=2
        )
        transfer_of(consumer).failing = 100  # the peer is not told that it is unwanted
        _, second = await started(orchestration, producer, consumer, prompt(50))
        neighbour = job(prompt(20, 3), max_tokens=200)
        busy = asyncio.ensure_future(collected(consumer, second, neighbour, add=False))
        consumer.add(neighbour)
        await until(lambda: consumer.load().extra["quarantined"] > 0)
        assert consumer.load().running == 1  # the batch went on
        decoded, plain = await busy
        assert decoded.error_code == "kv_unavailable"
        assert len(plain.token_ids) == 200
        await until(lambda: not consumer.load().extra["quarantined"])
        await closed(producer, consumer)

    run_virtual(main())


@PAIRED
def test_prefill_does_not_write_to_expired_target(orchestration: Orchestration) -> None:
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

    run_virtual(main())


@PAIRED
def test_prefill_does_not_write_to_peer_of_later_epoch(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(prefill_base_ms=20), await start_sim()
        first, second = await started(orchestration, producer, consumer, prompt(50))
        producer.add(first)
        assert first.kv_target is not None
        producer.observe_worker(first.kv_target.worker_id, 2, "engine-of-its-next-life")
        (prefilled,) = await collected(producer, first, add=False)
        assert prefilled.last.error is not None
        assert "expected epoch 2" in prefilled.last.error.message
        assert written(producer) == []
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.last.error == prefilled.last.error
        await closed(producer, consumer)

    run_virtual(main())


@PAIRED
def test_decode_ends_when_peer_is_replaced(orchestration: Orchestration) -> None:
    async def main() -> None:
        producer = await start_sim()
        consumer = await start_sim(
            handle_ttl_ms=200, handle_margin_ms=20, transfer_timeout_ms=50, transfer_tries_max=1
        )
        first, second = await started(orchestration, producer, consumer, prompt(50))
        await producer.close()
        assert second.kv is not None
        for epoch in (1, 2):  # of a worker that has nothing to do with it
            consumer.observe_worker("another", epoch, f"engine-of-another-{epoch}")
        assert consumer.load().extra["awaiting"] == 1
        consumer.observe_worker(second.kv.worker_id, 2, "engine-of-its-next-life")
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.error_code == "kv_unavailable"
        assert consumer.blocks.used == 4  # nobody can say what the lost one still does
        next_decode = replace(first, request_id="other.1", kv_target=None, phase=second.phase)
        next_decode = replace(next_decode, kv=replace(second.kv, engine_request_id="other.1"))
        assert (await answered(consumer, next_decode)).error_code == "stale_epoch"
        await closed(consumer)

    run_virtual(main())


@PAIRED
def test_decode_abort_ends_prefill_and_frees_blocks(orchestration: Orchestration) -> None:
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

    run_virtual(main())


@PAIRED
def test_prefill_does_not_write_to_aborted_decode(
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

    run_virtual(main())


@PAIRED
def test_abort_during_write_quarantines_blocks_on_both_sides(
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
        drop_prefix_cache(producer.blocks)
        drop_prefix_cache(consumer.blocks)
        assert (await answered(consumer, job(prompt(60, 4)))).last.finish_reason == "length"
        assert (producer.blocks.used, consumer.blocks.used) == (4, 4)
        transfer_of(producer).stalled = False
        await closed(producer, consumer)

    run_virtual(main())


@PAIRED
def test_prefill_abort_leaves_decode_running(
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

    run_virtual(main())


@PAIRED
@pytest.mark.parametrize("failures", [2, 8])
def test_write_retries_with_pauses_before_both_phases_fail(
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

    run_virtual(main())


@PAIRED
def test_late_write_ends_prefill_and_quarantines_blocks(orchestration: Orchestration) -> None:
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

    run_virtual(main())


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
def test_decode_refuses_mismatched_promise_and_notifies_prefill(
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

    run_virtual(main())


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
def test_prefill_refuses_mismatched_target_and_notifies_decode(change: dict[str, Any]) -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        first, second = paired_jobs(producer, consumer, prompt(50), DECODE_FIRST)
        first, target = await target_of(producer, consumer, first, second)
        prefilled = await answered(producer, replace(first, kv_target=replace(target, **change)))
        assert prefilled.error_code == "kv_unavailable"
        (decoded,) = await collected(consumer, second, add=False)
        assert decoded.last.error == prefilled.last.error
        await closed(producer, consumer)

    run_virtual(main())


def test_engine_rejects_paired_job_without_other_engine() -> None:
    async def main() -> None:
        engine, alone = await start_sim(), await start_sim(transfer="none")
        missing = job(prompt(50), orchestration=CONCURRENT)
        assert (await answered(engine, missing)).error_code == "kv_unavailable"
        own_handle = peer_handle(engine, "request.1", 50)
        itself = job(prompt(50), request_id="request.1", kv=own_handle, orchestration=CONCURRENT)
        assert (await answered(engine, itself)).error_code == "kv_unavailable"
        assert alone.capability.orchestrations == ()
        _, second = paired_jobs(engine, alone, prompt(50), CONCURRENT)
        assert (await answered(alone, second)).error_code == "kv_unavailable"
        await closed(engine, alone)

    run_virtual(main())


def test_deadline_ends_waiting_decode() -> None:
    async def main() -> None:
        producer, consumer = await start_sim(), await start_sim()
        _, second = paired_jobs(producer, consumer, prompt(50), CONCURRENT)
        late = replace(second, deadline_ms=wall_ms() + 20)
        assert (await answered(consumer, late)).error_code == "deadline_exceeded"
        await closed(producer, consumer)

    run_virtual(main())
