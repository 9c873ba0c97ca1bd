"""What a load writes is counted between two looks at the log's ends."""

import pytest

from infra.bench import log_counts
from infra.bench.log_counts import counts, end_offsets
from schemas.codec import Codec
from schemas.records import Cancellation, CancelReason
from schemas.settings import LogSettings
from streams.log.clients import LogProducer


@pytest.mark.kafka
async def test_counts_report_records_written_between_two_reads(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    given_up = Cancellation(
        request_id="r", session_id="s", reason=CancelReason.CLIENT_GONE, at_ms=1_700_000_000_000
    )

    async def send() -> None:
        await (await producer.send("cancellations", given_up, key="s", partition=0))

    await producer.start()
    try:
        await send()
        before = await end_offsets(kafka)
        for _ in range(3):
            await send()
    finally:
        await producer.stop()
    topic_counts = await counts(kafka, before, await end_offsets(kafka))
    counted = topic_counts.pop("cancellations")
    assert (counted["records"], counted["marks"]) == (3, 0)
    value = len(Codec().encode(given_up))
    assert 3 * (len("s") + value) < counted["bytes"] < 3 * (len("s") + value) + 1_000  # headers
    assert set(topic_counts) <= set(log_counts._INTERNAL)
