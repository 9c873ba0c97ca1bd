"""What a bridge reads by itself, on a real broker: gaps of transactions, by one consumer."""

import pytest

from schemas.settings import LogSettings
from streams.bridge.log_reader import PromptLogReader
from streams.log.clients import AssignedReader
from streams.log.transactions import OutgoingRecord, Transactions

pytestmark = pytest.mark.kafka


async def test_log_reader_reads_all_transaction_gaps_with_one_consumer(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every transaction leaves a gap behind its prompt."""
    started = []
    start = AssignedReader.start

    async def counted(reader: AssignedReader, at: object) -> None:
        started.append(at)
        await start(reader, at)  # type: ignore[arg-type]  # handed on as it came

    topic, place = f"{kafka.topic_prefix}prompts", (f"{kafka.topic_prefix}prompts", 0)
    writer, offsets = Transactions(kafka, "client"), list[int]()
    await writer.start()
    for number in range(4):
        outgoing = OutgoingRecord(topic=topic, partition=0, key=b"", value=b"%d" % number)
        offsets += await writer.commit([outgoing])
    await writer.stop()
    monkeypatch.setattr(AssignedReader, "start", counted)
    log_reader = PromptLogReader(kafka, place, "bridge-past")
    try:
        for before, after in zip(offsets, offsets[1:], strict=False):
            assert after > before + 1
            assert [prompt.offset async for prompt in log_reader.gap(before + 1, after)] == []
        left_out = [prompt.value async for prompt in log_reader.gap(offsets[0], offsets[3])]
        assert left_out == [b"0", b"1", b"2"], "what Faust might leave out is found"
        assert len(started) == 1
    finally:
        await log_reader.close()
    assert await log_reader.bounds() == (0, offsets[-1] + 2)
