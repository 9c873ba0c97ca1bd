"""Whether Faust leaves something out, over a log in memory and on virtual time."""

import pytest

from schemas.errors import BrokerUnavailable
from streams.bridge.partition_processor import PartitionProcessor
from tests.streams.bridge.memory_log import Bridge, MemoryLog, at, memory_log, take
from tests.virtual_time import virtual
from tests.waits import pass_time, until

__all__ = ["memory_log"]  # a fixture
STALL_S = 3.0


@virtual
async def test_partition_processor_reads_records_skipped_by_faust(memory_log: MemoryLog) -> None:
    """A gap holds transaction markers, or records."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        memory_log.put(2)
        await take(life, memory_log, 4, 6)
        await life.take(memory_log.prompts[0])  # one that it had
        await until(lambda: bridge.asking.submitted_offsets == [0, 2, 4, 6])
        for offset in (0, 2, 4, 6):
            bridge.asking.answer(offset)
        await until(lambda: at(memory_log)[0] == 7)
    assert memory_log.gaps == [(1, 4), (5, 6)]


async def check_repeatedly(life: PartitionProcessor, end: int, seconds: float) -> None:
    """Check for a stall as often as the watch does, for some seconds."""
    for _ in range(int(seconds / STALL_S * 5)):
        await pass_time(STALL_S / 5)
        await life.check_for_stall(end, STALL_S)


@virtual
async def test_partition_processor_fails_when_records_stop(memory_log: MemoryLog) -> None:
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await until(lambda: memory_log.commits == 1)
        memory_log.put(0)
        await check_repeatedly(life, 1, STALL_S - 1)
        with pytest.raises(BrokerUnavailable, match="records from 0 on do not come"):
            await check_repeatedly(life, 1, 2 * STALL_S)


@virtual
async def test_partition_processor_commits_past_trailing_markers(memory_log: MemoryLog) -> None:
    """Lag tools then report no lag."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        bridge.asking.answer(0)
        await until(lambda: at(memory_log)[0] == 1)
        await check_repeatedly(life, 3, STALL_S - 1)
        assert at(memory_log) == (1, set())
        await check_repeatedly(life, 3, 2 * STALL_S)
        assert at(memory_log) == (3, set())
        commits = memory_log.commits
        await check_repeatedly(life, 3, 2 * STALL_S)
        assert memory_log.commits == commits, "nothing is left"
        await take(life, memory_log, 3)
        bridge.asking.answer(3)
        await until(lambda: at(memory_log)[0] == 4)
    assert memory_log.gaps == []


@virtual
async def test_partition_processor_tolerates_lag_while_progressing(memory_log: MemoryLog) -> None:
    """It may lag behind its partition's end, or not have taken over yet."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await life.check_for_stall(100, STALL_S)
        await until(lambda: memory_log.commits == 1)
        memory_log.put(99)
        for offset in range(10):
            await take(life, memory_log, offset)
            bridge.asking.answer(offset)
            await check_repeatedly(life, 100, STALL_S / 2)
    assert not bridge.troubles
