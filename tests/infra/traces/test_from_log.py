"""A deployment's own traffic as a trace: lengths and names of blocks, no tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from infra.replay.recording import LINE, RECORD, RecordingRow, write
from infra.traces.formats import read
from infra.traces.from_log import trace_of
from schemas.codec import Codec
from schemas.records import Outcome, OutcomeKind, Priority, Request
from schemas.rules.outcomes import counting_outcomes
from tests.streams.builders import T0, request


def asked(name: str, at_ms: int, tokens: list[int], session: str = "s") -> Request:
    """A request with these tokens."""
    return replace(
        request(name),
        session_id=session,
        arrived_ms=T0 + at_ms,
        prompt_tokens=np.array(tokens, "<i4").tobytes(),
        priority=Priority.BATCH,
    )


def ended(name: str, at_ms: int, tokens: int, attempt: int = 1) -> Outcome:
    """How it ended."""
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


def test_requests_and_their_outcomes_are_a_trace() -> None:
    """Blocks are equal as far as prompts are, a part at the end too."""
    trace = trace_of(
        [
            asked("r2", 500, [1, 2, 3, 4, 5, 6, 7]),
            asked("r1", 0, [1, 2, 3, 4, 5, 6]),
            asked("r3", 900, [1, 2, 3, 4, 5, 6], session="other"),
            asked("r4", 901, [9, 2, 3, 4]),
            asked("r5", 902, [1]),
        ],
        counting_outcomes(
            [
                ended("r1", 100, 3),
                ended("r1", 150, 8, attempt=2),
                ended("r2", 700, 4),
                ended("r3", 990, 1),
                ended("r4", 990, 1),
            ]
        ),
        block_tokens=4,
    )
    assert [each.request_id for each in trace.arrivals] == ["r1", "r2", "r3", "r4"]
    assert [[*each.blocks] for each in trace.arrivals] == [[0, 1], [0, 2], [0, 1], [3]]
    assert [each.session_id for each in trace.arrivals] == ["s0", "s0", "s1", "s0"]
    first = trace.arrivals[0]
    assert (first.at_ms, first.prompt_tokens, first.output_tokens) == (0.0, 6, 8)
    assert (first.ttft_ms, first.total_ms, first.priority) == (110.0, 150.0, "batch")
    assert trace.began_unix_ms == T0
    assert trace.left_out == {"requests without an outcome yet": 1}


def test_a_recording_is_a_trace_of_its_span(tmp_path: Path) -> None:
    """A request that two lives of a router have applied is one; what came before, none."""
    codec = Codec()
    early, late = asked("r0", -9, [1, 2]), asked("r1", 5, [1, 2, 3])
    lines = [
        RecordingRow(LINE, topic="requests", value=codec.encode(r)) for r in (early, late, late)
    ]
    other = RecordingRow(LINE, topic="tick")
    ends = [ended("r0", 20, 2), ended("r1", 90, 7)]
    rows = [RecordingRow(RECORD, topic="outcomes", value=codec.encode(each)) for each in ends]
    path = tmp_path / "a.avro"
    write(path, {"since_ms": T0, "until_ms": T0 + 100}, [*lines, other, *rows])
    (found,) = read(path).arrivals
    assert (found.request_id, found.prompt_tokens, found.output_tokens) == ("r1", 3, 7)
