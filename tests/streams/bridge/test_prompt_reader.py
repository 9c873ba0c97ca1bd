"""Which prompt is blamed for lives that end, over a log in memory and on virtual time."""

import asyncio

import pytest

from schemas.errors import BrokerUnavailable
from streams.bridge.partition_processor import PartitionProcessor
from streams.bridge.prompt_reader import STARTS_MAX
from streams.bridge.prompts import PromptParser, PromptQuestion
from streams.bridge.records.record import PromptRecord
from streams.log.cancellation import cancel_and_wait
from streams.log.faust.crash_notes import CRASHES_MAX
from tests.streams.bridge.memory_log import Bridge, MemoryLog, memory_log
from tests.virtual_time import virtual
from tests.waits import pass_time, until

__all__ = ["memory_log"]  # a fixture


async def take_all_prompts(life: PartitionProcessor, log: MemoryLog) -> None:
    """Read all prompts anew, without waiting; the processor skips those that it has."""

    async def take_all() -> None:
        for prompt in log.prompts:
            await life.take(prompt)

    life._spawn(take_all())
    await pass_time(0)


async def kill(life: PartitionProcessor) -> None:
    """End the processor without a last commit."""
    life._over = True
    await cancel_and_wait(*life._tasks)


@virtual
async def test_prompt_reader_fails_prompt_after_repeated_crashes(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After several starts without progress, it notes each prompt before reading it."""
    question, read = PromptParser.question, list[int]()

    async def fall(prompts: PromptParser, record: PromptRecord) -> PromptQuestion | None:
        read.append(record.offset)
        if record.offset == 2:
            await asyncio.get_running_loop().create_future()
        return await question(prompts, record)

    monkeypatch.setattr(PromptParser, "question", fall)
    for offset in range(5):
        memory_log.put(offset)
    for lives in range(1, STARTS_MAX + CRASHES_MAX + 1):
        processor = Bridge(memory_log).life()
        await take_all_prompts(processor, memory_log)
        await until(lambda lives=lives: read.count(2) == lives)
        await pass_time(1)
        await kill(processor)
        assert memory_log.note.falls == max(0, lives - STARTS_MAX)
    assert memory_log.note.suspect_offset == 2
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take_all_prompts(life, memory_log)
        await until(lambda: 2 in memory_log.answers())
        assert "3 members began this record" in (memory_log.answers()[2].error_message or "")
        for offset in (0, 1, 3, 4):
            bridge.asking.answer(offset)
        await until(lambda: len(memory_log.answers()) == 5)
        assert memory_log.note.start_count == memory_log.note.falls == 0


@virtual
async def test_prompt_reader_clears_suspect_once_prompt_is_read(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that cannot commit the withdrawal of its note still stops."""
    question, read, is_stuck = PromptParser.question, list[int](), True

    async def fall(prompts: PromptParser, record: PromptRecord) -> PromptQuestion | None:
        read.append(record.offset)
        if is_stuck:
            await asyncio.get_running_loop().create_future()
        return await question(prompts, record)

    monkeypatch.setattr(PromptParser, "question", fall)
    memory_log.put(0)
    for lives in range(1, STARTS_MAX + 2):
        processor = Bridge(memory_log).life()
        await take_all_prompts(processor, memory_log)
        await until(lambda lives=lives: read.count(0) == lives)
        await pass_time(1)
        if lives <= STARTS_MAX:
            await kill(processor)
    commits, memory_log.trouble = memory_log.commits, BrokerUnavailable("away")
    await processor.stop()
    assert (memory_log.commits, memory_log.note.falls) == (commits, 1)
    bridge, is_stuck = Bridge(memory_log), False
    async with bridge.living() as life:
        await take_all_prompts(life, memory_log)
        await until(lambda: bridge.asking.submitted_offsets == [0])
        assert memory_log.note.falls == 0 and not bridge.troubles


@virtual
async def test_prompt_reader_blames_no_prompt_for_unrelated_stop(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle processors, stops during a read, and a registry outage do not count."""
    for _ in range(STARTS_MAX + 1):
        async with Bridge(memory_log).living():
            await until(lambda: memory_log.commits > 0)
            await pass_time(1)
    assert memory_log.note.start_count == 0, "there was nothing to fall on"
    question, fetch_schema, waits = (
        PromptParser.question,
        PromptParser.fetch_schema,
        asyncio.Event(),
    )

    async def wait(prompts: PromptParser, record: PromptRecord) -> PromptQuestion | None:
        waits.set()
        await asyncio.get_running_loop().create_future()
        return None

    monkeypatch.setattr(PromptParser, "question", wait)
    memory_log.put(0)
    for stops in range(STARTS_MAX + CRASHES_MAX + 1):
        waits.clear()
        processor = Bridge(memory_log).life()
        await take_all_prompts(processor, memory_log)
        await waits.wait()
        assert memory_log.note.falls == (stops >= STARTS_MAX)
        await processor.stop()
        assert memory_log.note.falls == 0
    monkeypatch.setattr(PromptParser, "question", question)
    monkeypatch.setattr(PromptParser, "fetch_schema", wait)
    for _ in range(CRASHES_MAX + 1):
        waits.clear()
        processor = Bridge(memory_log).life()
        await take_all_prompts(processor, memory_log)
        await waits.wait()
        await kill(processor)
        assert memory_log.note.falls == 0
    monkeypatch.setattr(PromptParser, "fetch_schema", fetch_schema)
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take_all_prompts(life, memory_log)
        await until(lambda: bridge.asking.submitted_offsets == [0])


@virtual
async def test_prompt_reader_counts_no_start_over_markers_alone(memory_log: MemoryLog) -> None:
    """Otherwise processors that only follow each other would read with care."""
    memory_log.end = 3
    async with Bridge(memory_log).living() as life:
        await until(lambda: memory_log.commits == 1)
        assert memory_log.note.start_count == 1
        for _ in range(3):
            await life.check_for_stall(3, 1.0)
            await pass_time(1)
        assert memory_log.position is not None and memory_log.position.offset == 3
        assert memory_log.note.start_count == 0
