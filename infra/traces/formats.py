"""Lists the formats of traffic traces by name: how to recognize, read and write each."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra.traces.dynamo import SCHEMA, dynamo_lines, read_dynamo
from infra.traces.fields import open_text, opener
from infra.traces.mooncake import AGENTIC, mooncake_lines, read_agentic, read_mooncake
from infra.traces.otel import read_otel
from infra.traces.prompts import body
from infra.traces.published import AZURE, BURSTGPT, read_azure, read_burstgpt
from infra.traces.trace import Trace, with_request_ids
from schemas.errors import ConfigError

_AVRO = b"Obj\x01"


def _recording(path: Path) -> Trace:
    from infra.traces.from_log import read_recording  # it imports the log's clients

    return read_recording(path)


def inputs_json(trace: Trace, model: str) -> Iterator[str]:
    """Yield aiperf's `inputs.json`, a document with the body of every turn's call and no times.

    `aiperf profile --custom-dataset-type inputs_json --endpoint-type raw` sends the bodies
    unchanged. A request without a session gets one of its own.
    """
    sessions: dict[str, list[dict[str, Any]]] = {}
    for arrival in with_request_ids(trace):
        payloads = sessions.setdefault(arrival.session_id or arrival.request_id, [])
        payloads.append(body(trace, arrival, model))
    data = [{"session_id": name, "payloads": payloads} for name, payloads in sessions.items()]
    yield json.dumps({"data": data})


READERS: dict[str, Callable[[Path], Trace]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "agentic": read_agentic,
    "dynamo": read_dynamo,
    "otel": read_otel,
    "recording": _recording,
}
WRITERS: dict[str, Callable[[Trace, str], Iterator[str]]] = {
    "mooncake": mooncake_lines,
    "dynamo": dynamo_lines,
    "aiperf": inputs_json,
}
_FIRST_CHARS = 1 << 20  # of a line, to recognize its format
_EXPECTED = (
    "expected a trace: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT's CSV "
    "(Timestamp, Model, Request tokens, Response tokens), Mooncake's JSON lines (timestamp, "
    "input_length, output_length, hash_ids), agentic Mooncake version 2, dynamo.request.trace.v1, "
    "OpenTelemetry spans as OTLP JSON, or a file of `trivium record`"
)


def read(path: Path) -> Trace:
    """Return a trace of any format, recognized by its first line.

    Raises ConfigError with the bad line, OSError where the file cannot be read.
    """
    trace = READERS[_format_of(path)](path)
    if not trace.arrivals:
        why = ", ".join(f"{count} {what}" for what, count in trace.left_out.items())
        raise ConfigError(f"{path}: expected requests, found {why or 'none'}")
    return trace


def is_recording(path: Path) -> bool:
    """Return whether the file is a `trivium record` file, or another Avro file; raises OSError."""
    with path.open("rb") as binary:
        return binary.read(len(_AVRO)) == _AVRO


def _format_of(path: Path) -> str:
    if is_recording(path):
        return "recording"
    with open_text(path) as file:
        line = next((line for line in iter(lambda: file.readline(_FIRST_CHARS), "")
                     if line.strip()), "")  # fmt: skip
        rest = file.read(_FIRST_CHARS)
    text = line.strip()
    if text.startswith("{"):
        return _of_object(path, text, rest)
    columns = {name.strip() for name in next(csv.reader([text.removeprefix("\ufeff")]), [])}
    for name, required_columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
        if required_columns <= columns:
            return name
    raise ConfigError(f"{path}:1: {_EXPECTED}; found {text[:60]!r}")


def _of_object(path: Path, text: str, rest: str) -> str:
    if '"resourceSpans"' in text or (text == "{" and '"resourceSpans"' in rest):
        return "otel"
    try:
        row: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:1: {_EXPECTED}; no JSON: {error}") from error
    inner = row.get("event") if isinstance(row.get("event"), dict) else row
    if row.get("schema") == AGENTIC:
        return "agentic"
    if isinstance(inner, dict) and inner.get("schema") == SCHEMA:
        return "dynamo"
    if row.keys() & {"input_length", "input_tokens", "hash_ids", "text_input", "messages"}:
        return "mooncake"
    raise ConfigError(f"{path}:1: {_EXPECTED}; found {text[:60]!r}")


def write(trace: Trace, path: Path, format_: str, model: str) -> None:
    """Write a trace, compressed if the name ends in .gz.

    Raises ConfigError where the format cannot express the trace; the file is then unchanged.
    """
    if format_ not in WRITERS:
        raise ConfigError(f"--to: expected {', '.join(WRITERS)}, found {format_!r}")
    beside = path.with_name(f"{path.name}.part")
    try:
        with opener(path)(beside, "wt", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in WRITERS[format_](trace, model))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
