"""Prompts, questions and ended streams as tests of the bridge want them."""

import json
from typing import Any

from schemas.codec import Codec
from schemas.records import Endpoint, OutcomeKind, StreamRetrieved
from schemas.rules.sizes import RECORD_BYTES_MAX
from streams.bridge.config import Pair
from streams.bridge.limits import Limits
from streams.bridge.prompts import Prompts, Question
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.gateway.stream.event_id import StreamKey
from streams.gateway.stream.stream import Stream
from tests.streams.gateway.samples import MODEL, ended

CODEC = Codec()
KEY = StreamKey(
    parent_id="q1",
    session_id="s1",
    model=MODEL,
    endpoint=Endpoint.CHAT,
    partition=0,
    offset=0,
    created_s=1,
    deadline_ms=9_000,
    choices=1,
)


def pair(**fields: Any) -> Pair:
    return Pair(**{"prompts": "rows", "answers": "rows.answers", **fields})


def limits(answers: int, *, letters: int = RECORD_BYTES_MAX) -> Limits:
    """What topics of that pair take."""
    return Limits(known={"rows.answers": answers, "rows.dlq": letters})


def record(value: Any, **fields: Any) -> PromptRecord:
    """A prompt's record: bytes as they are, anything else as JSON."""
    if not isinstance(value, bytes | None):
        value = json.dumps(value, ensure_ascii=False).encode()
    usual: dict[str, Any] = {"partition": 1, "offset": 7, "timestamp_ms": 5, "key": b"k"}
    return PromptRecord(topic="rows", value=value, **{**usual, **fields})


async def asked(value: Any, of: Pair | None = None, url: str = "", **fields: Any) -> Question:
    """What a value asks on a pair's topic; `url` is a schema registry's."""
    found = await prompts(of or pair(), url).question(record(value, **fields))
    assert found is not None
    return found


def prompts(of: Pair, url: str = "") -> Prompts:
    """What reads those of a pair."""
    return Prompts(of, MODEL, CODEC, WriterSchemas(url, 60_000))


def body_of(question: Question) -> dict[str, Any]:
    """As a client of the API would have sent it."""
    return question.body.model_dump(exclude_unset=True, by_alias=True)


def stream(*texts: str, retrieved: StreamRetrieved | None = None, **end: Any) -> Stream:
    """One that has ended after these tokens."""
    found = Stream("q1", restarts=True)
    for i, text in enumerate(texts):
        found.push(1, i, len("".join(texts[:i])), 1, text, [i])
    if retrieved is not None:
        found.note_retrieved(retrieved)
    assert found.finish(ended("q1", texts, kind=OutcomeKind.COMPLETED, **end))
    return found
