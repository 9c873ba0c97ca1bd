"""What retrieval workers read, as nobody means it: retrievals, documents, dead letters.

All that is wrong is buried or answered with its error, and the good ones between are served.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RecordError, RecordTooLarge
from schemas.records import (
    CollectionMade,
    Document,
    RetrievalRequest,
)
from schemas.retrieval import pack_vector
from schemas.rules.metadata import METADATA_CHARS_MAX
from schemas.rules.sizes import DIM_MAX
from schemas.settings import LogSettings
from schemas.topics import collection_key, document_key
from streams.log.clock import wall_ms
from tests.fuzz.strategies import CODEC, JSON, examples, record_bytes, text_of
from tests.loop_stalls import unstalled
from tests.schemas.examples import example
from tests.streams.agents.fakes import FakeEvent, FakeProducer
from workers.retrieval.collections import Collections
from workers.retrieval.feed.documents import DocumentFollower
from workers.retrieval.feed.refusals import Refusals
from workers.retrieval.intake import RetrievalIntake
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.responder import Responder
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.index import Index

LOG = LogSettings()
PLACE = ShardPlace(0, 1)
KINDS = ("RetrievalRequest", "Hits", "Document", "CollectionMade", "CollectionDeclared", "Work")
MANY = 6_000_000  # of empty strings: each is a byte, and takes long to be read
LONG = "x" * 2_000
NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 40, 512, 513, 2**31 - 1])
TIMES = st.sampled_from([-(2**63), 0, 2**62, 2**63 - 1])
IDS = st.sampled_from(["q", "", "\x00", "d1", "books/d1", LONG, "\x1b[2J", "\U0010ffff" * 300])
COLLECTIONS = st.sampled_from(["books", "books", "films", "", "a/b", "..", "\x00", LONG])
FLOATS = st.sampled_from([0.0, 1.0, -1.0, 3e38, 1e-45, float("nan"), float("inf")])
VECTORS = st.lists(FLOATS, min_size=4, max_size=4).map(pack_vector) | st.binary(max_size=21)
FILTERS = st.sampled_from(["", "{", '{"a": {"$in": [1, "x"]}}', '{"$not": {"a": 1}}']) | JSON.map(
    lambda condition: text_of(condition).decode("utf-8", "replace")[:20_000]
)
RETRIEVALS = st.builds(
    lambda changes: dataclasses.replace(retrieval_request(), **changes),
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("retrieval_id", "request_id", "asker_id"), IDS),
            **dict.fromkeys(("k", "top_m", "width", "patience", "reply_partition"), NUMBERS),
            **dict.fromkeys(("asked_ms", "deadline_ms"), TIMES),
            "collection": COLLECTIONS,
            "vector": VECTORS,
            "filter": FILTERS,
            "seeds": st.lists(IDS, max_size=3),
            "wants_seeds": st.booleans(),
        },
    ),
)
METADATA = st.sampled_from(["", "[]", '{"a": 1}', '{"a": "\\ud800"}']) | JSON.map(
    lambda metadata_value: text_of({"a": metadata_value}).decode("utf-8", "replace")
)
DOCUMENTS = st.builds(
    Document,
    document_id=IDS,
    collection=COLLECTIONS,
    vector=VECTORS,
    metadata=METADATA,
    deleted=st.booleans(),
    at_ms=TIMES,
)
MADE = st.builds(
    CollectionMade,
    collection=COLLECTIONS,
    dim=NUMBERS,
    shard=NUMBERS,
    shards=NUMBERS,
    at_ms=TIMES,
)


def retrieval_request(name: str = "good") -> RetrievalRequest:
    return RetrievalRequest(
        retrieval_id=name,
        request_id="",
        asker_id="a",
        reply_partition=0,
        collection="books",
        vector=pack_vector([1, 0, 0, 0]),
        k=2,
        asked_ms=0,
        deadline_ms=wall_ms() + 60_000,
    )


def library() -> Collections:
    index = Index(4)
    index.upsert(["d1", "d2"], np.eye(4)[:2], [{"a": 1}, {"b": "x"}])
    collections = Collections(RetrievalSettings(collections_max=4))
    collections.indexes["books"] = index
    return collections


@asynccontextmanager
async def intake() -> AsyncIterator[tuple[RetrievalIntake, FakeProducer]]:
    producer, engine = FakeProducer(), SearchEngine(EngineSettings(lanes=1))
    responder = Responder(engine, library(), RetrievalSettings(), worker_id="r", place=PLACE)
    try:
        yield RetrievalIntake(LOG, CODEC, producer, responder, 4_096), producer  # type: ignore[arg-type]  # a fake
    finally:
        await engine.close()


async def given_to(
    worker_intake: RetrievalIntake, values: Sequence[bytes | None]
) -> list[FakeEvent]:
    events = [FakeEvent(value, offset) for offset, value in enumerate(values)]
    for event in events:
        event.topic = "retrieval.decode"
        await unstalled(worker_intake.take(event.topic, event))
    await unstalled(worker_intake.drain())
    assert not worker_intake.group.has_failed
    return events


@examples(120)
@given(
    st.lists(RETRIEVALS.map(CODEC.encode) | record_bytes(KINDS) | st.binary(max_size=9), max_size=6)
)
async def test_retrieval_worker_answers_or_dead_letters_records(values: list[bytes]) -> None:
    async with intake() as (worker_intake, producer):
        events = await given_to(worker_intake, [*values, CODEC.encode(retrieval_request())])
        assert all(event.acks for event in events), "each is acknowledged"
        hit_records = [record for topic, record, *_ in producer.sends if topic == "hits"]
        buried = [topic for topic, *_ in producer.sends if topic.endswith(".dlq")]
        assert len(hit_records) + len(buried) == len(events)
        (good,) = [record for record in hit_records if record.retrieval_id == "good"][-1:]
        assert list(good.document_ids) == ["d1", "d2"] and good.error is None
        for record in hit_records:
            CODEC.encode(record)


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": "x" * (5 << 20)},  # the hits repeat it, twice
        {"collection": "x" * 2_000},
        {"vector": bytes(6 << 20)},
        {"seeds": [""] * MANY},
    ],
)
async def test_retrieval_worker_dead_letters_oversized_request(
    wrong: dict[str, Any],
) -> None:
    """Its hits were too large to be sent, which ended the worker after every restart."""
    async with intake() as (worker_intake, producer):
        bad = CODEC.encode(dataclasses.replace(retrieval_request(), **wrong))
        events = await given_to(worker_intake, [bad, CODEC.encode(retrieval_request("after"))])
        assert all(event.acks for event in events)
        assert [topic for topic, *_ in producer.sends] == ["retrieval.decode.dlq", "hits"]


async def test_retrieval_worker_reports_error_for_oversized_hits() -> None:
    """Document ids may be long; 512 of the longest do not fit a record."""
    async with intake() as (worker_intake, producer):
        index = worker_intake._responder._collections.get("books")
        names = [f"{number}".zfill(1_024) for number in range(600)]
        index.upsert(names, np.ones((600, 4)))
        await given_to(
            worker_intake, [CODEC.encode(dataclasses.replace(retrieval_request(), k=512))]
        )
        ((_, reply, *_),) = producer.sends
        assert reply.error.code == RecordTooLarge.code and not reply.document_ids


def document_record(key: bytes | None, value: bytes | None, offset: int) -> Any:
    return SimpleNamespace(
        topic="documents", partition=0, offset=offset, timestamp=1, key=key, value=value, headers=()
    )


@st.composite
def document_records(draw: st.DrawFn) -> tuple[bytes | None, bytes | None]:
    """A key and a value, which go together mostly."""
    record = draw(DOCUMENTS | MADE)
    if isinstance(record, Document):
        key = document_key(record.collection, record.document_id)
    else:
        key = collection_key(record.collection, record.shard, record.shards)
    value: bytes | None = CODEC.encode(record)
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(["", "/", "//", "books/d1", "/0/1/books", "x"]))
    if draw(st.integers(0, 3)) == 0:
        value = draw(record_bytes(KINDS) | st.none() | st.binary(max_size=9))
    return draw(st.just(key.encode()) | st.sampled_from([None, b"\xff"])), value


@examples(120)
@given(st.lists(document_records(), max_size=8))
async def test_document_follower_applies_or_refuses_records(
    key_values: list[tuple[bytes, bytes]],
) -> None:
    collections = library()
    member: Any = SimpleNamespace(member_id="r")
    feed = DocumentFollower(LOG, CODEC, None, collections, PLACE, member)  # type: ignore[arg-type]  # unused
    good = Document(document_id="new", collection="books", vector=pack_vector([0] * 4), at_ms=1)
    records = [document_record(key, value, at) for at, (key, value) in enumerate(key_values)]
    last = document_record(b"books/new", CODEC.encode(good), len(records))
    await unstalled(feed._apply([*records, last]))
    assert feed.offsets[0] == len(records) + 1
    index = collections.get("books")
    assert "new" in index.rows.row_of and len(index) <= 4 + len(key_values)
    assert len(feed.refusals._waiting) <= len(records)
    for name, dim in collections.unpublished_dims().items():
        CODEC.encode(CollectionMade(collection=name, dim=dim, shard=0, shards=1, at_ms=1))
    for state in collections.states():
        CODEC.encode(state)


async def test_document_follower_refuses_collection_under_document_key() -> None:
    """An assertion once took this record for a document."""
    collection = CollectionMade(collection="books", dim=3, shard=0, shards=1, at_ms=0)
    member: Any = SimpleNamespace(member_id="r")
    feed = DocumentFollower(LOG, CODEC, None, library(), PLACE, member)  # type: ignore[arg-type]  # unused
    keys = (b"books/d1", b"/0/1/films")
    records = [document_record(key, CODEC.encode(collection), at) for at, key in enumerate(keys)]
    await feed._apply(records)
    reasons = [error.message for _, error in feed.refusals._waiting.values()]
    assert "expected a document under the key" in reasons[0]
    assert "expected the key b'/0/1/books'" in reasons[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vector": bytes(4 * (DIM_MAX + 1))}, "at most 65536 values"),
        ({"metadata": '{"a": "' + "x" * METADATA_CHARS_MAX + '"}'}, "at most 65536 characters"),
    ],
)
def test_collections_refuse_oversized_documents(fields: dict[str, Any], reason: str) -> None:
    """Memory for 1 024 rows is allocated at once, and JSON is parsed in one piece."""
    wide = Document(document_id="w", collection="wide", vector=pack_vector([1]), at_ms=0)
    change = DocumentChange("wide", "w", dataclasses.replace(wide, **fields))
    ((_, error),) = library().apply([change])
    assert reason in error.message


def test_heartbeat_fits_states_of_many_collections() -> None:
    """The names of collections may be long, and a worker may hold a thousand of them."""
    collections = Collections(RetrievalSettings(collections_max=2_000))
    collections.indexes = {"\U0010ffff" * 120 + str(number): Index(4) for number in range(1_000)}
    states = collections.states()
    assert 300 < len(states) < 1_000
    beat = example("trivium.Heartbeat")
    load = dataclasses.replace(beat.search, collections=states)
    CODEC.decode(CODEC.encode(dataclasses.replace(beat, search=load)))


def test_collections_limit_dims_without_documents() -> None:
    collections = library()
    for number in range(20_000):
        name = f"c{number}"
        collections.learn(
            CollectionMade(collection=name, dim=3, shard=0, shards=1, at_ms=0), here=True
        )
    assert len(collections._dims) <= 10_000


async def test_refusals_ignore_forged_dead_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers without a value ended the worker that looked for its own dead letters."""
    names = ("x-dlq-partition", "x-dlq-offset", "x-dlq-timestamp")
    forged = [
        SimpleNamespace(timestamp=1, headers=headers)
        for headers in ([], [(name, None) for name in names], [(names[0], b"\xff")])
    ]
    own_letter = SimpleNamespace(headers=[(name, b"1") for name in names])

    async def read_dead_letters(_: Any) -> list[Any]:
        return [*forged, own_letter]

    monkeypatch.setattr(Refusals, "_buried", read_dead_letters)
    producer: Any = FakeProducer()
    waiting = Refusals(LOG, producer, is_first=lambda: True, client_id="r")
    record = document_record(b"books/x", b"rubbish", 1)
    record.partition = 1
    waiting.add(record, RecordError("rubbish"))
    await waiting.look()
    assert not waiting._waiting and not producer.sends, "it is buried already"
