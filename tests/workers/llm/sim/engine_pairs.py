"""Two simulated engines that have one request at the same time, for tests."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from schemas.records import KvHandle, Orchestration
from tests.waits import until
from tests.workers.llm.engines import (
    Answer,
    allocated,
    paired_jobs,
    transfer_of,
)
from tests.workers.llm.sim.block_checks import check_blocks
from workers.kv.transfer import Direction
from workers.llm.engine import Job
from workers.llm.sim.engine import SimEngine

CONCURRENT, DECODE_FIRST = Orchestration.CONCURRENT, Orchestration.DECODE_FIRST
PAIRED = pytest.mark.parametrize("orchestration", [CONCURRENT, DECODE_FIRST])
BLOCK_BYTES = 16 * 256


def written(engine: SimEngine) -> list[int]:
    """How many blocks each of its writes moved."""
    moves = transfer_of(engine).moved
    return [len(move.local_blocks) for move in moves if move.direction is Direction.WRITE]


async def closed(*engines: SimEngine) -> None:
    await until(lambda: not any(engine.blocks.used for engine in engines))
    for engine in engines:
        check_blocks(engine.blocks)
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


async def until_written(producer: SimEngine, first: Job) -> Answer:
    """Add a prefill job and go on until its write is posted; the first token's answer."""
    producer.add(first)
    outputs = await producer.outputs()
    await until(lambda: producer.load().running == 1)
    return Answer(outputs)
