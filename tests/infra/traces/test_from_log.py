"""A deployment's own traffic as a trace: lengths and names of blocks, no tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from infra.traces.formats import read
from infra.traces.from_log import trace_of
from infra.traces.recording import LINE, RECORD, RecordingRow, write
from schemas.codec import Codec
from schemas.records import Outcome, OutcomeKind, Priority, Request
from schemas.rules.outcomes import counting_outcomes
from tests.streams.builders import T0, request


def make_request(name: str, at_ms: int, tokens: list[int], session: str = "s") -> Request:
    """Return a request with these prompt tokens."""
    return replace(
        request(name),
        session_id=session,
        arrived_ms=T0 + at_ms,
        prompt_tokens=np.array(tokens, "<i4").tobytes(),
        priority=Priority.BATCH,
    )


def make_outcome(name: str, at_ms: int, tokens: int, attempt: int = 1) -> Outcome:
    """Return a completed outcome of the request."""
    return Outcome(
        request_id=name,
        session_id="s",
        attempt=attempt,
        kind=OutcomeKind.COMPLETED,
        written_by="w",
        completion_tokens=tokens,
        first_token_ms=T0 + at_ms - 40,
        ended_ms=T0 + at_ms,
    )


def test_log_trace_joins_requests_with_outcomes() -> None:
    """Equal prefixes share block ids, a partial block at the end included."""
    trace = trace_of(
        [
            make_request("r2", 500, [1, 2, 3, 4, 5, 6, 7]),
            make_request("r1", 0, [1, 2, 3, 4, 5, 6]),
            make_request("r3", 900, [1, 2, 3, 4, 5, 6], session="other"),
            make_request("r4", 901, [9, 2, 3, 4]),
            make_request("r5", 902, [1]),
        ],
        counting_outcomes(
            [
                make_outcome("r1", 100, 3),
                make_outcome("r1", 150, 8, attempt=2),
                make_outcome("r2", 700, 4),
                make_outcome("r3", 990, 1),
                make_outcome("r4", 990, 1),
            ]
        ),
        block_tokens=4,
    )
    assert [arrival.request_id for arrival in trace.arrivals] == ["r1", "r2", "r3", "r4"]
    assert [[*arrival.blocks] for arrival in trace.arrivals] == [[0, 1], [0, 2], [0, 1], [3]]
    assert [arrival.session_id for arrival in trace.arrivals] == ["s0", "s0", "s1", "s0"]
    first = trace.arrivals[0]
    assert (first.at_ms, first.prompt_tokens, first.output_tokens) == (0.0, 6, 8)
    assert (first.ttft_ms, first.total_ms, first.priority) == (110.0, 150.0, "batch")
    assert trace.began_unix_ms == T0
    assert trace.left_out == {"requests without an outcome yet": 1}


def test_recording_trace_covers_its_span_once(tmp_path: Path) -> None:
    """A request that two router lives applied counts once; earlier ones do not."""
    codec = Codec()
    early, late = make_request("r0", -9, [1, 2]), make_request("r1", 5, [1, 2, 3])
    lines = [
        RecordingRow(LINE, topic="requests", value=codec.encode(r)) for r in (early, late, late)
    ]
    tick = RecordingRow(LINE, topic="tick")
    ends = [make_outcome("r0", 20, 2), make_outcome("r1", 90, 7)]
    rows = [RecordingRow(RECORD, topic="outcomes", value=codec.encode(outcome)) for outcome in ends]
    path = tmp_path / "a.avro"
    write(path, {"since_ms": T0, "until_ms": T0 + 100}, [*lines, tick, *rows])
    (arrival,) = read(path).arrivals
    assert (arrival.request_id, arrival.prompt_tokens, arrival.output_tokens) == ("r1", 3, 7)
