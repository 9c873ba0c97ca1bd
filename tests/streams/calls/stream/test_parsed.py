"""Parsed answers: each delta is delivered once, whatever the log repeats; its form in chats."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import AnswerDelta, DeltaKind, Endpoint, StreamEnd
from streams.calls.stream.chunks import ChunkWriter, whole_answer
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.parsed import ParsedAnswer, answer_of, chat_deltas
from streams.calls.stream.stream import Stream
from tests.streams.calls.stream.test_stream import ANSWER, IDS, Piece, deliveries
from tests.streams.gateway.samples import events_of, stream_end

REASONING, CONTENT, CALL = DeltaKind.REASONING, DeltaKind.CONTENT, DeltaKind.CALL
DELTAS = [
    AnswerDelta(seq=2, kind=REASONING, text="Hm"),
    AnswerDelta(seq=3, kind=REASONING, text=", so"),
    AnswerDelta(seq=3, kind=CONTENT, text="I"),
    AnswerDelta(seq=4, kind=CONTENT, text=" ask"),
    AnswerDelta(seq=6, kind=CALL, index=0, call_id="call_a", name="f"),
    AnswerDelta(seq=7, kind=CALL, index=0, text='{"x":'),
    AnswerDelta(seq=8, kind=CALL, index=0, text="1}"),
    AnswerDelta(seq=8, kind=CALL, index=1, call_id="call_b", name="g", text="{}"),
    AnswerDelta(seq=9, kind=CONTENT, text="!"),
]
LAST = [AnswerDelta(seq=len(ANSWER), kind=CONTENT, text="?")]
KEY = StreamKey(
    parent_id="r1",
    session_id="s1",
    model="m",
    endpoint=Endpoint.CHAT,
    partition=0,
    offset=0,
    created_s=1,
    deadline_ms=0,
    tenant="",
    choices=1,
)


def push(stream: Stream, piece: Piece) -> None:
    """Push a row of a parsed answer, which has no text."""
    deltas = [delta for delta in DELTAS if piece.first < delta.seq <= piece.last]
    ids = IDS[piece.first : piece.last]
    stream.push(piece.attempt, piece.first, 0, len(ids), "", ids, deltas=deltas)


def whole(deltas: Sequence[AnswerDelta]) -> ParsedAnswer:
    answer = ParsedAnswer()
    answer.add(deltas)
    return answer


def end_of(attempt: int = 1) -> StreamEnd:
    end = stream_end("r1", ANSWER, attempt=attempt, finish_reason="tool_calls", deltas=LAST)
    return replace(end, chars=0)


@given(deliveries())
def test_stream_yields_each_delta_once(delivery: tuple[list[Piece], list[Piece]]) -> None:
    rows, last = delivery
    stream, deltas = Stream("r1"), list[AnswerDelta]()
    for row in rows:
        push(stream, row)
        deltas += stream.deltas
        stream.deltas = []
        assert deltas == [delta for delta in DELTAS if delta.seq <= stream.next_seq]
    assert stream.finish(end_of(last[0].attempt))
    assert deltas + stream.deltas == DELTAS + LAST


@given(deliveries())
def test_restarted_answer_has_deltas_of_its_last_attempt(
    delivery: tuple[list[Piece], list[Piece]],
) -> None:
    rows, last = delivery
    stream = Stream("r1", restarts=True)
    for row in [*rows, *last]:
        push(stream, row)
    assert stream.finish(end_of(last[0].attempt))
    assert stream.deltas == DELTAS + LAST


@given(deliveries(), st.integers(0, len(ANSWER)))
def test_resumed_stream_yields_deltas_that_client_lacks(
    delivery: tuple[list[Piece], list[Piece]], has: int
) -> None:
    """Also of a client that has every token, but not the end."""
    rows, last = delivery
    client = Stream("r1")
    push(client, Piece(1, 0, has))
    client.drain()
    assert client.position_after(has) == client.position()
    stream = Stream("r1", client_position=client.position_after(has))
    for row in rows:
        push(stream, row)
    stream.finish(end_of(last[0].attempt))
    assert stream.deltas == [delta for delta in DELTAS if delta.seq > has] + LAST


def streamed(stream: Stream, pieces: Sequence[Piece], **options: Any) -> list[Any]:
    writer = ChunkWriter(KEY, [stream], **options)
    events = b""
    for piece in pieces:
        push(stream, piece)
        events += writer.drain()
    stream.finish(end_of())
    return events_of((events + writer.drain()).decode())


@given(st.sets(st.integers(1, len(ANSWER) - 1)))
def test_events_add_up_to_answer_however_rows_are_grouped(cuts: set[int]) -> None:
    edges = sorted({0, *cuts, len(ANSWER)})
    pieces = [Piece(1, first, last) for first, last in pairwise(edges)]
    events = streamed(Stream("r1"), pieces)
    content, reasoning, calls = "", "", dict[int, list[str]]()
    for event in events:
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning") or ""
        for called in choice["delta"].get("tool_calls", ()):
            function = called["function"]
            parts = calls.setdefault(called["index"], [called.get("id"), function.get("name"), ""])
            parts[2] += function["arguments"]
    assert (content, reasoning) == ("I ask!?", "Hm, so")
    assert calls == {0: ["call_a", "f", '{"x":1}'], 1: ["call_b", "g", "{}"]}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_events_keep_order_of_content_after_calls() -> None:
    """A client that resumes between two events of one write gets the second."""
    parts = list(chat_deltas(DELTAS, names_reasoning_content=True))
    assert [seq for seq, _ in parts] == [8, 9]
    assert parts[0][1]["reasoning_content"] == parts[0][1]["reasoning"] == "Hm, so"
    assert [call["index"] for call in parts[0][1]["tool_calls"]] == [0, 1]
    stream = Stream("r1")
    events = streamed(stream, [Piece(1, 0, len(ANSWER))], name=b"k")
    assert len(events) == 5  # role, two parts, what the end adds, and the end
    client = Stream("r1")
    push(client, Piece(1, 0, 8))
    resumed = Stream("r1", client_position=client.position_after(8))
    rest = streamed(resumed, [Piece(1, 0, len(ANSWER))], client_positions=[client.position()])
    assert [event["choices"][0]["delta"].get("content") for event in rest] == ["!", "?", None]


def test_whole_answer_has_parts_of_message() -> None:
    stream = Stream("r1", restarts=True)
    push(stream, Piece(1, 0, len(ANSWER)))
    stream.finish(replace(end_of(), reasoning_tokens=3))
    assert answer_of(stream).call_texts == ['["call_a", "f", {"x": 1}]', '["call_b", "g", {}]']
    body = json.loads(whole_answer(KEY, [stream], names_reasoning_content=True))
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "I ask!?",
        "reasoning": "Hm, so",
        "reasoning_content": "Hm, so",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    calls_alone = whole([delta for delta in DELTAS if delta.kind is CALL])
    assert calls_alone.message(names_reasoning_content=False)["content"] is None
