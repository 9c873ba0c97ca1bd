"""Topics `responses` and `responses.deleted`, on a broker."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotFound
from schemas.records import StoredResponse
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.openai.responses.log import ResponseTopic
from streams.openai.responses.response_id import RecordPosition
from tests.waits import meanwhile

CODEC = Codec()


def record(name: str = "r1") -> StoredResponse:
    return StoredResponse(
        request_id=name,
        session_id="s1",
        created_ms=1,
        deadline_ms=2,
        token_partition=0,
        token_offset=0,
        options="{}",
        input="[]",
        history="[]",
    )


def topic(log: LogSettings, producer: LogProducer | None) -> ResponseTopic:
    return ResponseTopic(log, CODEC, gateway_id="g", accept_ms=30_000, producer=lambda: producer)


async def is_gone(store: ResponseTopic, name: str, place: RecordPosition) -> bool:
    try:
        await store.get(name, place)
    except NotFound:
        return True
    return False


@contextlib.asynccontextmanager
async def following(log: LogSettings, producer: LogProducer) -> AsyncIterator[ResponseTopic]:
    """One gateway's side, as it runs."""
    store = topic(log, producer)
    async with meanwhile(store.follow()):
        yield store


@pytest.mark.kafka
async def test_response_topic_finds_record_by_position_until_deletion(kafka: LogSettings) -> None:
    """A gateway that starts later does not find the deleted record, either."""
    async with (
        LogProducer(kafka, CODEC, durable=True, client_id="g") as producer,
        following(kafka, producer) as first,
        following(kafka, producer) as second,
    ):
        places = {name: await first.put(record(name)) for name in ("r1", "r2")}
        for name in ("r1", "r2"):
            assert await second.get(name, places[name]) == record(name)
        nowhere = RecordPosition(places["r2"].partition, places["r2"].offset + 9)
        for name, place in (("r1", places["r2"]), ("r1", nowhere), ("r1", RecordPosition(99, 0))):
            assert await is_gone(second, name, place)
        await first.delete(record("r1"))
        assert await is_gone(first, "r1", places["r1"])
        assert await is_gone(second, "r1", places["r1"])
        async with following(kafka, producer) as third:
            assert await is_gone(third, "r1", places["r1"]), "at its first look"
            assert await third.get("r2", places["r2"]) == record("r2")


async def test_response_topic_raises_before_deletions_are_read() -> None:
    store = ResponseTopic(LogSettings(), CODEC, gateway_id="g", accept_ms=1, producer=lambda: None)
    with pytest.raises(BrokerUnavailable, match="not read"):
        await store.get("r1", RecordPosition(0, 0))


async def test_response_topic_rejects_put_without_broker() -> None:
    store = topic(LogSettings(), None)
    with pytest.raises(BrokerUnavailable):
        await store.put(record())


async def test_response_topic_ignores_undecodable_deletion() -> None:
    store = topic(LogSettings(), None)
    store.note(b"no record")
    store.note(CODEC.encode(record()))
    with pytest.raises(BrokerUnavailable):
        await store.delete(record())
