"""A recording's requests for a cluster: what is asked once more, and how the ends compare."""

from pathlib import Path
from typing import Any

import pytest

from infra.traces.recording import LINE, RecordingRow, write
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
    rows = [
        RecordingRow(LINE, topic="requests", value=CODEC.encode(request)) for request in requests
    ]
    rows += [
        RecordingRow(LINE, topic="outcomes", value=CODEC.encode(outcome)) for outcome in outcomes
    ]
    write(path / "a.avro", {"since_ms": 0, "until_ms": 1 << 62, **about}, rows)
    return Resend(path / "a.avro")


def make_outcome(request_id: str, kind: OutcomeKind = OutcomeKind.COMPLETED) -> Outcome:
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


def sent_requests(resend: Resend, **changes: Any) -> list[SentRequest]:
    """Return each answer as recorded, unless changed."""
    fields = {"output_tokens": 12, "finish_reason": "stop", "chunks_s": [1.25, 2.0], **changes}
    return [SentRequest(arrival=arrival, sent_s=1.0, **fields) for arrival in resend.trace.arrivals]


@pytest.mark.parametrize(
    ("form", "body_fields"),
    [
        (None, {}),
        (Structured(kind=StructuredKind.REGEX, value="a+"), {"guided_regex": "a+"}),
        (Structured(kind=StructuredKind.CHOICE, value='["a"]'), {"guided_choice": ["a"]}),
        (
            Structured(kind=StructuredKind.STRUCTURAL_TAG, value='{"type": "structural_tag"}'),
            {"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}},
        ),
        (
            Structured(kind=StructuredKind.JSON_OBJECT, value=""),
            {"response_format": {"type": "json_object"}},
        ),
    ],
)
def test_resend_body_repeats_prompt_and_sampling(
    tmp_path: Path, form: Structured | None, body_fields: dict[str, Any]
) -> None:
    """The prompt is sent as tokens, with the seed that was sampled."""
    sampling = Sampling(
        max_tokens=40,
        temperature=0.7,
        seed=5,
        stop=("x",),
        allowed_token_ids=(7, 8),
        structured=form,
    )
    request = builders.request("r1", sampling=sampling)
    resend = recorded(tmp_path, [request], [make_outcome("r1")])
    (arrival,) = resend.trace.arrivals
    body = resend.make_body(arrival, "tiny")
    assert body["prompt"] == unpack_tokens(request.prompt_tokens)
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (40, 0.7, 5)
    assert (body["stop"], body["stream"], body["model"]) == (["x"], True, "tiny")
    assert body["allowed_token_ids"] == [7, 8]
    assert body_fields.items() <= body.items()


def test_resend_asks_for_exact_length_of_cancelled_answer(tmp_path: Path) -> None:
    request = builders.request("r1", sampling=Sampling(max_tokens=40, min_tokens=20))
    resend = recorded(tmp_path, [request], [make_outcome("r1", OutcomeKind.CANCELLED)])
    body = resend.make_body(resend.trace.arrivals[0], "tiny")
    assert (body["max_tokens"], body["min_tokens"]) == (12, 12)
    comparison = resend.compare(sent_requests(resend))
    assert (comparison.completed_then, comparison.completed_now, comparison.differences) == (
        0,
        1,
        [],
    )


def test_resend_compares_outcomes(tmp_path: Path) -> None:
    resend = recorded(tmp_path, [builders.request("r1")], [make_outcome("r1")])
    comparison = resend.compare(sent_requests(resend))
    assert (comparison.same, comparison.differences, comparison.failed) == (1, [], 0)
    assert comparison.times["TTFT p50"] == (100.0, 250.0)
    assert comparison.times["latency p99"] == (700.0, 1_000.0)
    for change, now in (
        ({"output_tokens": 13}, "stop, 13 tokens"),
        ({"finish_reason": "length"}, "length, 12 tokens"),
        ({"error": "queue_full"}, "queue_full"),
    ):
        comparison = resend.compare(sent_requests(resend, **change))
        assert comparison.differences == [OutcomeDifference("r1", "stop, 12 tokens", now)]
        assert (comparison.failed, comparison.same) == (int("error" in change), 0)


def test_resend_without_bodies_asks_for_lengths(tmp_path: Path) -> None:
    """Stand-ins are tokens of no model."""
    request = builders.request("r1", tokens=20)
    resend = recorded(tmp_path, [request], [make_outcome("r1")], leaves_out=["bodies"])
    body = resend.make_body(resend.trace.arrivals[0], "tiny")
    assert len(body["prompt"]) == 20 and max(body["prompt"]) < 256
    assert (body["max_tokens"], body["ignore_eos"]) == (12, True)
    assert resend.compare(sent_requests(resend, finish_reason="length")).same == 1


def test_resend_refuses_recording_without_outcomes(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected requests that have ended, found none"):
        recorded(tmp_path, [builders.request("r1")], [])
