"""Which prompt is blamed for lives that end, over a log in memory and on virtual time."""

import asyncio

import pytest

from schemas.errors import BrokerUnavailable
from schemas.log.cancellation import cancel_and_wait
from schemas.log.faust.crash_notes import CRASHES_MAX
from streams.bridge.partition_processor import PartitionProcessor
from streams.bridge.prompt_reader import STARTS_MAX
from streams.bridge.prompts import PromptParser, PromptQuestion
from streams.bridge.records.record import PromptRecord
from tests.streams.bridge.lives import Bridge, MemoryLog, memory_log
from tests.virtual import virtual
from tests.waiting import pass_time, until

__all__ = ["memory_log"]  # a fixture


async def take_again(life: PartitionProcessor, log: MemoryLog) -> None:
    """All prompts, of which the life leaves out those that it has; waits for none of them."""

    async def take_all() -> None:
        for each in log.prompts:
            await life.take(each)

    life._spawn(take_all())
    await pass_time(0)


async def killed(life: PartitionProcessor) -> None:
    """It ends and says nothing."""
    life._over = True
    await cancel_and_wait(*life._tasks)


@virtual
async def test_a_prompt_that_bridges_fall_on_is_an_error_in_the_end(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins at a place where nobody got on notes what it reads, one by one."""
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
        made = Bridge(memory_log).life()
        await take_again(made, memory_log)
        await until(lambda lives=lives: read.count(2) == lives)
        await pass_time(1)
        await killed(made)
        assert memory_log.note.falls == max(0, lives - STARTS_MAX)
    assert memory_log.note.suspect_offset == 2
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take_again(life, memory_log)
        await until(lambda: 2 in memory_log.answers())
        assert "3 members began this record" in (memory_log.answers()[2].error_message or "")
        for offset in (0, 1, 3, 4):
            bridge.asking.answer(offset)
        await until(lambda: len(memory_log.answers()) == 5)
        assert memory_log.note.start_count == memory_log.note.falls == 0


@virtual
async def test_a_prompt_that_is_read_in_the_end_is_blamed_no_more(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a life that cannot take its note back fail to end."""
    question, read, is_stuck = PromptParser.question, list[int](), True

    async def fall(prompts: PromptParser, record: PromptRecord) -> PromptQuestion | None:
        read.append(record.offset)
        if is_stuck:
            await asyncio.get_running_loop().create_future()
        return await question(prompts, record)

    monkeypatch.setattr(PromptParser, "question", fall)
    memory_log.put(0)
    for lives in range(1, STARTS_MAX + 2):
        made = Bridge(memory_log).life()
        await take_again(made, memory_log)
        await until(lambda lives=lives: read.count(0) == lives)
        await pass_time(1)
        if lives <= STARTS_MAX:
            await killed(made)
    commits, memory_log.trouble = memory_log.commits, BrokerUnavailable("away")
    await made.stop()
    assert (memory_log.commits, memory_log.note.falls) == (commits, 1)
    bridge, is_stuck = Bridge(memory_log), False
    async with bridge.living() as life:
        await take_again(life, memory_log)
        await until(lambda: bridge.asking.asked == [0])
        assert memory_log.note.falls == 0 and not bridge.troubles


@virtual
async def test_no_prompt_is_blamed_for_an_end_that_is_no_fault_of_its_own(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle lives counted, and a stop while a healthy prompt was read made an error (found 28); so
    did kills while its schema's registry was away.
    """
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
        made = Bridge(memory_log).life()
        await take_again(made, memory_log)
        await waits.wait()
        assert memory_log.note.falls == (stops >= STARTS_MAX)
        await made.stop()
        assert memory_log.note.falls == 0
    monkeypatch.setattr(PromptParser, "question", question)
    monkeypatch.setattr(PromptParser, "fetch_schema", wait)
    for _ in range(CRASHES_MAX + 1):
        waits.clear()
        made = Bridge(memory_log).life()
        await take_again(made, memory_log)
        await waits.wait()
        await killed(made)
        assert memory_log.note.falls == 0
    monkeypatch.setattr(PromptParser, "fetch_schema", fetch_schema)
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take_again(life, memory_log)
        await until(lambda: bridge.asking.asked == [0])


@virtual
async def test_a_life_that_found_marks_alone_had_nothing_to_fall_on(memory_log: MemoryLog) -> None:
    """Else lives that only follow each other there would read the next prompt with care."""
    memory_log.end = 3
    async with Bridge(memory_log).living() as life:
        await until(lambda: memory_log.commits == 1)
        assert memory_log.note.start_count == 1
        for _ in range(3):
            await life.check_for_stall(3, 1.0)
            await pass_time(1)
        assert memory_log.position is not None and memory_log.position.offset == 3
        assert memory_log.note.start_count == 0
