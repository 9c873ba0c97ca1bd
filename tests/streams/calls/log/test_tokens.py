"""Frames that cannot be meant are no records."""

from dataclasses import replace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from schemas.codec import Codec
from schemas.errors import NotFound, RecordError
from schemas.settings import LogSettings
from streams.calls.log.tokens import decode_frame, frames_from
from streams.log.clients import LogProducer
from streams.log.connecting import client_options
from tests.streams.gateway.samples import frame


@pytest.mark.parametrize(
    "changes",
    [
        {"first_seqs": [-1]},
        {"first_chars": [-1]},
        {"texts": []},
        {"attempts": [1, 1]},
        {"token_counts": [3]},
        {"token_counts": [-2]},
    ],
)
def test_decode_frame_rejects_inconsistent_rows(changes: dict[str, Any]) -> None:
    """Such rows would cut text from the end of what a client has."""
    codec = Codec()
    good = frame("r1", ["a", "b"])
    for record, fits in ((good, True), (replace(good, **changes), False)):
        value = codec.encode(record)
        if fits:
            assert decode_frame(codec, value).request_ids == ("r1",)
        else:
            with pytest.raises(RecordError, match="TokenFrame"):
                decode_frame(codec, value)


@pytest.mark.kafka
async def test_frames_from_reads_to_end_or_raises_not_found(kafka: LogSettings) -> None:
    """It raises for frames that the log has deleted instead of waiting for them."""
    codec = Codec()

    async def read(offset: int) -> list[str]:
        frames = frames_from(kafka, codec, 1, offset, "reader", live=False)
        return [name async for token_frame in frames for name in token_frame.request_ids]

    async with LogProducer(kafka, codec, durable=True, client_id="w") as producer:
        for name in ("r1", "r2", "r3"):
            await (await producer.send("tokens", frame(name, ["a"]), key="g", partition=1))
    assert await read(1) == ["r2", "r3"]
    assert await read(3) == []
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    try:
        place = TopicPartition(kafka.topic_prefix + "tokens", 1)
        await admin.delete_records({place: RecordsToDelete(before_offset=3)})
    finally:
        await admin.close()
    with pytest.raises(NotFound, match="the beginning of this answer no more"):
        await read(1)
    assert await read(3) == []
