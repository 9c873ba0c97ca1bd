"""Topics `responses` and `responses.deleted`, on a broker."""

import asyncio

import pytest

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotFound
from schemas.log.clients import LogProducer
from schemas.records import StoredResponse
from schemas.settings import LogSettings
from streams.gateway.log.responses import ResponseTopic
from streams.gateway.stream.response_id import Place
from tests.waiting import until

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


async def gone(store: ResponseTopic, name: str, place: Place) -> bool:
    try:
        await store.get(name, place)
    except NotFound:
        return True
    return False


@pytest.mark.kafka
async def test_a_record_is_found_by_its_place_until_it_is_deleted(kafka: LogSettings) -> None:
    """By every gateway, one that starts later too (issue 12, responses)."""
    async with LogProducer(kafka, CODEC, durable=True, client_id="g") as producer:
        first, second = topic(kafka, producer), topic(kafka, producer)
        places = {name: await first.put(record(name)) for name in ("r1", "r2")}
        assert await second.get("r1", places["r1"]) == record("r1")
        assert await second.get("r2", places["r2"]) == record("r2")
        nowhere = Place(places["r2"].partition, places["r2"].offset + 9)
        for name, place in (("r1", places["r2"]), ("r1", nowhere), ("r1", Place(99, 0))):
            assert await gone(second, name, place)
        following = asyncio.create_task(second.follow())
        await first.delete(record("r1"))
        assert await gone(first, "r1", places["r1"])

        async def is_gone() -> bool:
            return await gone(second, "r1", places["r1"])

        await until(is_gone)
        third = topic(kafka, producer)
        later = asyncio.create_task(third.follow())

        async def is_gone_there() -> bool:
            return await gone(third, "r1", places["r1"])

        await until(is_gone_there)
        assert await third.get("r2", places["r2"]) == record("r2")
        for task in (following, later):
            task.cancel()
        await asyncio.wait([following, later])


async def test_without_a_log_nothing_is_stored() -> None:
    store = topic(LogSettings(), None)
    with pytest.raises(BrokerUnavailable):
        await store.put(record())


async def test_what_is_no_record_deletes_nothing() -> None:
    store = topic(LogSettings(), None)
    store.note(b"no record")
    store.note(CODEC.encode(record()))
    with pytest.raises(BrokerUnavailable):
        await store.delete(record())
