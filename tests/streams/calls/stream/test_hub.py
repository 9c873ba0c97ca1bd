"""What a hub knows of its streams."""

from dataclasses import replace

import pytest

from schemas.records import Endpoint, StreamRetrieved, StreamStart, StreamVoid, TokenFrame
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call, Hub
from tests.streams.gateway.samples import frame, stream_end

NOTHING = frame("q1", [])
KEY = StreamKey(
    parent_id="q1",
    session_id="s1",
    model="m",
    endpoint=Endpoint.CHAT,
    partition=0,
    offset=0,
    created_s=1,
    deadline_ms=9_000,
    choices=1,
)


@pytest.mark.parametrize(
    ("token_frame", "is_told_of"),
    [
        (frame("q1", ["a"]), True),
        (frame("q1", ["a"], first_seq=7, first_char=7), True),
        (frame("q1", [], end=stream_end("q1", ["a"])), True),
        (replace(NOTHING, starts=[StreamStart(request_id="q1", attempt=1)]), True),
        (replace(NOTHING, voids=[StreamVoid(request_id="q1", attempt=1)]), True),
        (replace(NOTHING, retrieved=[StreamRetrieved(request_id="q1", collection="c")]), True),
        (frame("q2", ["a"], end=stream_end("q2", ["a"])), False),
    ],
)
def test_hub_marks_streams_named_by_frame(token_frame: TokenFrame, is_told_of: bool) -> None:
    """Bridges skip tokens of records that name no active stream."""
    hub = Hub()
    call = Call(KEY, deadline_ms=9_000, arrived_s=0.0, waits_for_end=True)
    call.add("q1", 0)
    hub.add(call)
    assert not call.streams[0].has_frames
    hub.apply(token_frame, 1.0)
    assert call.streams[0].has_frames == is_told_of


@pytest.mark.parametrize("prefill_at", [0, 1, 2])
@pytest.mark.parametrize("prior_text", ["", "ab"])
def test_whole_answer_takes_decode_token_in_any_order(prefill_at: int, prior_text: str) -> None:
    """Prefill and decode sample different tokens in a near tie; nobody has read the first."""
    hub = Hub()
    call = Call(KEY, deadline_ms=9_000, arrived_s=0.0, waits_for_end=True)
    call.add("q1", 0)
    hub.add(call)
    begins = len(prior_text)
    start = StreamStart(request_id="q1", attempt=2, prefill_worker="p", decode_worker="d")
    prefilled, decoded, last = [
        replace(
            frame("q1", [text], attempt=2, first_seq=seq, first_char=char),
            worker_id=worker,
            token_ids=[ord(text[0])],
            starts=[start],
        )
        for text, seq, char, worker in (
            ("xyz", begins, begins, "p"),
            ("c", begins, begins, "d"),
            ("de", begins + 1, begins + 1, "d"),
        )
    ]
    end = stream_end("q1", [*prior_text, "c", "de"], attempt=2)
    frames = [decoded, replace(last, ends=[end])]
    frames.insert(prefill_at, prefilled)
    hub.apply(frame("q1", [*prior_text]), 1.0)
    for token_frame in frames:
        hub.apply(token_frame, 1.0)
    (stream,) = call.streams
    assert stream.end is not None and call.failure is None
    assert "".join(stream.texts) == prior_text + "cde"
    assert list(stream._delivered.ids)[begins:] == [ord("c"), ord("d")]
