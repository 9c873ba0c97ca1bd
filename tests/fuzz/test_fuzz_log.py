"""Every topic's bytes as somebody else writes them: buried or ignored, never the end of a
reader."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ClientError, RecordError
from schemas.topics import TOPICS, check_record
from streams.agents.app import TOPICS as ROUTED
from streams.calls.stream.event_id import EventIds
from tests.fuzz.strategies import CODEC, changed_bytes, examples, record_bytes
from tests.loop_stalls import unstalled
from tests.streams.agents.fakes import FakeEvent, router_with_partition
from tests.streams.gateway.in_process import EVENT_KEY

ALL_KINDS = tuple(sorted({kind for topic in TOPICS.values() for kind in topic.records}))
INTS = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2)


@examples(400)
@given(st.binary(max_size=60) | record_bytes(ALL_KINDS))
def test_codec_decodes_bytes_or_raises_record_error(value: bytes) -> None:
    try:
        record = CODEC.decode(value)
    except RecordError:
        return
    for topic in TOPICS:
        try:
            check_record(topic, record)
        except RecordError:
            continue


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(ROUTED), record_bytes(ALL_KINDS)), min_size=4, max_size=8)
)
async def test_router_survives_forged_records(records: list[tuple[str, bytes]]) -> None:
    partitions, producer = await router_with_partition()
    process = partitions.process
    outbox = asyncio.create_task(process.outbox.run())
    for offset, (topic, value) in enumerate(records):
        event = FakeEvent(value, offset)
        event.topic = f"test.{topic}"
        await unstalled(process.take(topic, event))
        assert not process.group.has_failed
    await unstalled(process.outbox.drain())
    assert not outbox.done(), outbox
    outbox.cancel()


@examples(300)
@given(st.text(max_size=80), st.data())
def test_event_ids_refuse_unsigned_values(text: str, data: st.DataObject) -> None:
    ids = EventIds(EVENT_KEY, choices_max=4)
    value = data.draw(changed_bytes(text.encode("utf-8", "replace"))).decode("latin-1")
    try:
        ids.parse(value, "")
    except ClientError:
        return
    raise AssertionError(f"{value!r} was taken for an id")
