"""A recording's requests for a cluster: what is asked once more, and how the ends compare."""

from pathlib import Path
from typing import Any

import pytest

from infra.replay.recording import LINE, RecordingRow, write
from infra.traces.resend import OutcomeDifference, Resend
from infra.traces.sender import SentRequest
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import Outcome, OutcomeKind, Sampling, Structured, StructuredKind
from schemas.rules.tokens import unpack_tokens
from tests.streams import builders
from tests.streams.builders import T0

CODEC = Codec()


def recorded(path: Path, requests: list[Any], outcomes: list[Any], **about: Any) -> Resend:
    rows = [RecordingRow(LINE, topic="requests", value=CODEC.encode(each)) for each in requests]
    rows += [RecordingRow(LINE, topic="outcomes", value=CODEC.encode(each)) for each in outcomes]
    write(path / "a.avro", {"since_ms": 0, "until_ms": 1 << 62, **about}, rows)
    return Resend(path / "a.avro")


def ended(request_id: str, kind: OutcomeKind = OutcomeKind.COMPLETED) -> Outcome:
    return Outcome(
        request_id=request_id,
        session_id="s",
        attempt=1,
        kind=kind,
        finish_reason="stop",
        written_by="replica-a",
        completion_tokens=12,
        arrived_ms=T0,
        first_token_ms=T0 + 100,
        ended_ms=T0 + 700,
    )


def heard(again: Resend, **changes: Any) -> list[SentRequest]:
    """Each answer as it was then, unless changed."""
    told = {"output_tokens": 12, "finish_reason": "stop", "chunks_s": [1.25, 2.0], **changes}
    return [SentRequest(arrival=each, sent_s=1.0, **told) for each in again.trace.arrivals]


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        (None, {}),
        (Structured(kind=StructuredKind.REGEX, value="a+"), {"guided_regex": "a+"}),
        (Structured(kind=StructuredKind.CHOICE, value='["a"]'), {"guided_choice": ["a"]}),
        (
            Structured(kind=StructuredKind.JSON_OBJECT, value=""),
            {"response_format": {"type": "json_object"}},
        ),
    ],
)
def test_the_same_is_asked(tmp_path: Path, form: Structured | None, asked: dict[str, Any]) -> None:
    """Token by token, with the seed that was drawn."""
    sampling = Sampling(max_tokens=40, temperature=0.7, seed=5, stop=("x",), structured=form)
    request = builders.request("r1", sampling=sampling)
    again = recorded(tmp_path, [request], [ended("r1")])
    (arrival,) = again.trace.arrivals
    body = again.make_body(arrival, "tiny")
    assert body["prompt"] == unpack_tokens(request.prompt_tokens)
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (40, 0.7, 5)
    assert (body["stop"], body["stream"], body["model"]) == (["x"], True, "tiny")
    assert asked.items() <= body.items()


def test_what_was_cancelled_is_as_long_as_it_was(tmp_path: Path) -> None:
    request = builders.request("r1", sampling=Sampling(max_tokens=40, min_tokens=20))
    again = recorded(tmp_path, [request], [ended("r1", OutcomeKind.CANCELLED)])
    body = again.make_body(again.trace.arrivals[0], "tiny")
    assert (body["max_tokens"], body["min_tokens"]) == (12, 12)
    found = again.compare(heard(again))
    assert (found.completed_then, found.completed_now, found.differences) == (0, 1, [])


def test_ends_are_compared(tmp_path: Path) -> None:
    again = recorded(tmp_path, [builders.request("r1")], [ended("r1")])
    found = again.compare(heard(again))
    assert (found.same, found.differences, found.failed) == (1, [], 0)
    assert found.times["TTFT p50"] == (100.0, 250.0)
    assert found.times["latency p99"] == (700.0, 1_000.0)
    for change, now in (
        ({"output_tokens": 13}, "stop, 13 tokens"),
        ({"finish_reason": "length"}, "length, 12 tokens"),
        ({"error": "queue_full"}, "queue_full"),
    ):
        found = again.compare(heard(again, **change))
        assert found.differences == [OutcomeDifference("r1", "stop, 12 tokens", now)]
        assert (found.failed, found.same) == (int("error" in change), 0)


def test_without_bodies_lengths_are_asked_for(tmp_path: Path) -> None:
    """Stand-ins are no tokens of any model."""
    request = builders.request("r1", tokens=20)
    again = recorded(tmp_path, [request], [ended("r1")], leaves_out=["bodies"])
    body = again.make_body(again.trace.arrivals[0], "tiny")
    assert len(body["prompt"]) == 20 and max(body["prompt"]) < 256
    assert (body["max_tokens"], body["ignore_eos"]) == (12, True)
    assert again.compare(heard(again, finish_reason="length")).same == 1


def test_a_recording_in_which_nothing_ended_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected requests that have ended, found none"):
        recorded(tmp_path, [builders.request("r1")], [])
