"""What a bridge reads by itself, on a real broker: gaps of transactions, by one consumer."""

import pytest

from schemas.log.clients import AssignedReader
from schemas.log.transactions import OutgoingRecord, Transactions
from schemas.settings import LogSettings
from streams.bridge.log_reader import PromptLogReader

pytestmark = pytest.mark.kafka


async def test_gaps_of_transactions_are_looked_into_by_one_consumer(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes prompts in transactions leaves one behind each."""
    started = []
    start = AssignedReader.start

    async def counted(reader: AssignedReader, at: object) -> None:
        started.append(at)
        await start(reader, at)  # type: ignore[arg-type]  # handed on as it came

    topic, place = f"{kafka.topic_prefix}prompts", (f"{kafka.topic_prefix}prompts", 0)
    writer, offsets = Transactions(kafka, "client"), list[int]()
    await writer.start()
    for number in range(4):
        made = OutgoingRecord(topic=topic, partition=0, key=b"", value=b"%d" % number)
        offsets += await writer.commit([made])
    await writer.stop()
    monkeypatch.setattr(AssignedReader, "start", counted)
    past = PromptLogReader(kafka, place, "bridge-past")
    try:
        for before, after in zip(offsets, offsets[1:], strict=False):
            assert after > before + 1
            assert [each.offset async for each in past.gap(before + 1, after)] == []
        left_out = [each.value async for each in past.gap(offsets[0], offsets[3])]
        assert left_out == [b"0", b"1", b"2"], "what Faust might leave out is found"
        assert len(started) == 1
    finally:
        await past.close()
    assert await past.bounds() == (0, offsets[-1] + 2)
