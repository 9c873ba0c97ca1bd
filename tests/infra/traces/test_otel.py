"""OpenTelemetry spans of calls to models."""

import json
from pathlib import Path

import pytest

from infra.traces.formats import read
from schemas.errors import ConfigError
from tests.infra.traces.samples import span, spans, written

START_NS = 1_777_312_800_123_456_789
CHAT = {
    "gen_ai__operation__name": "chat",
    "gen_ai__request__model": "gpt-4",
    "gen_ai__conversation__id": "conv_5",
    "gen_ai__usage__input_tokens": 100,
    "gen_ai__usage__output_tokens": 180,
    "gen_ai__response__time_to_first_chunk": 0.5,
}
OLD = {
    "gen_ai__operation__name": "text_completion",
    "gen_ai__usage__prompt_tokens": 7,
    "gen_ai__usage__completion_tokens": 8,
}


def test_otel_reader_keeps_model_calls_and_counts_other_spans(tmp_path: Path) -> None:
    document = spans(
        span("later", START_NS + 1_500_000_000, **OLD),
        span("first", START_NS, **CHAT),
        span("tool", START_NS, gen_ai__operation__name="execute_tool"),
        span("http", START_NS, http__method="GET"),
        span("failed", START_NS, gen_ai__operation__name="chat", error__type="timeout"),
        span("mute", START_NS, gen_ai__operation__name="chat"),
    )
    trace = read(written(tmp_path, [document]))
    first, later = trace.arrivals
    assert (first.at_ms, first.prompt_tokens, first.output_tokens) == (0.0, 100, 180)
    assert (first.session_id, first.model) == ("conv_5", "gpt-4")
    assert (first.ttft_ms, first.total_ms) == (500.0, 2_000.0)
    assert (later.at_ms, later.prompt_tokens, later.output_tokens) == (1_500.0, 7, 8)
    assert trace.began_unix_ms == START_NS // 1_000_000
    assert trace.left_out == {
        "spans of execute_tool": 1,
        "spans of something else": 1,
        "calls that failed": 1,
        "calls without lengths": 1,
    }


def test_otel_reader_accepts_multiline_document(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(spans(span("a", START_NS, **CHAT)), indent=2))
    assert [arrival.request_id for arrival in read(path).arrivals] == ["a"]


def test_otel_reader_refuses_missing_calls_and_bad_spans(tmp_path: Path) -> None:
    path = written(tmp_path, [spans(span("http", START_NS))])
    with pytest.raises(ConfigError, match="expected requests, found 1 spans of something else"):
        read(path)
    bad = span("a", START_NS, **CHAT | {"gen_ai__usage__input_tokens": "many"})
    with pytest.raises(ConfigError, match=r":2: span a: gen_ai.usage.input_tokens: expected"):
        read(written(tmp_path, [spans(span("b", START_NS, **CHAT)), spans(bad)]))
