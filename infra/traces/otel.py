"""Reads OpenTelemetry spans of model calls from OTLP JSON: one document, or one on each line.

By the semantic conventions for generative AI: spans whose `gen_ai.operation.name` is chat,
text_completion or generate_content. Lengths are `gen_ai.usage.input_tokens` and `output_tokens` (or
their older names), the session is `gen_ai.conversation.id`. Other spans, and calls without lengths,
are left out and counted. The collector's file exporter writes such files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.traces.fields import Fields, json_object, open_text
from infra.traces.trace import Arrival, Trace, TraceBuilder

OPERATIONS = ("chat", "text_completion", "generate_content")
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue")


def read_otel(path: Path) -> Trace:
    """Return the calls by the times when their spans began."""
    builder = TraceBuilder("otel")
    calls: list[tuple[int, Fields, Fields]] = []
    for span in _spans(path):
        attributes = _attributes(span)
        operation = attributes.values.get("gen_ai.operation.name")
        if operation not in OPERATIONS:
            builder.left_out[f"spans of {operation or 'something else'}"] += 1
        elif not (attributes.has(*_INPUT) and attributes.has(*_OUTPUT)):
            failed = attributes.has("error.type")
            builder.left_out["calls that failed" if failed else "calls without lengths"] += 1
        else:
            calls.append((span.count("startTimeUnixNano"), span, attributes))
    began_ns = min((start for start, _, _ in calls), default=0)
    for start_ns, span, attributes in calls:
        builder.arrivals.append(_arrival(start_ns - began_ns, start_ns, span, attributes))
    return builder.build(began_unix_ms=began_ns // 1_000_000)


def _arrival(at_ns: int, start_ns: int, span: Fields, attributes: Fields) -> Arrival:
    session, model = "gen_ai.conversation.id", "gen_ai.request.model"
    return Arrival(
        at_ms=at_ns / 1e6,
        prompt_tokens=attributes.count(*_INPUT),
        output_tokens=attributes.count(*_OUTPUT),
        request_id=span.text("spanId"),
        session_id=attributes.text(session) if attributes.has(session) else "",
        model=attributes.text(model) if attributes.has(model) else "",
        ttft_ms=attributes.number(_FIRST_CHUNK) * 1e3 if attributes.has(_FIRST_CHUNK) else None,
        total_ms=max(0, span.count("endTimeUnixNano") - start_ns) / 1e6,
    )


def _spans(path: Path) -> Iterator[Fields]:
    for document in _documents(path):
        for resource in document.objects("resourceSpans"):
            for scope in resource.objects("scopeSpans"):
                yield from scope.objects("spans")


def _documents(path: Path) -> Iterator[Fields]:
    """Yield the lines, or the whole file where its first line is no object by itself."""
    with open_text(path) as file:
        lines = file.readlines()
    if lines and lines[0].strip() in ("{", "["):
        yield json_object("".join(lines), str(path))
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield json_object(line, f"{path}:{number}")


def _attributes(span: Fields) -> Fields:
    """Return the attributes by key, those with plain values only."""
    values: dict[str, Any] = {}
    for attribute in span.objects("attributes"):
        value = attribute.inner("value").values
        values |= {attribute.text("key"): value[kind] for kind in _VALUES if kind in value}
    return Fields(values, f"{span.where}: span {span.values.get('name', '')}")
