"""Reads and writes Dynamo's request trace, `dynamo.request.trace.v1`: JSON lines, plain or gzip.

By Dynamo's reference page and loader. A `request_end` row has the time when a request was received,
the length of its answer, and in `replay` the prompt's length with one rolling hash per block, the
last one partly full. `agent_context` names the session: in every row or in none. Payload and tool
rows are left out. A row may be wrapped in `event`, as Dynamo's sinks write it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.traces.fields import Fields, json_lines
from infra.traces.trace import Arrival, BlockIds, Trace, TraceBuilder, blocks_of, with_delays
from schemas.errors import ConfigError

SCHEMA = "dynamo.request.trace.v1"
_PASSED_OVER = ("request_payload", "tool_start", "tool_end", "tool_error")
_OWN_HASHES = 1 << 48  # for requests without block ids; ids from traces are below


def record_of(row: Fields) -> Fields:
    """Return the row itself, or the row that a sink has wrapped."""
    return row.inner("event") if isinstance(row.values.get("event"), Mapping) else row


def read_dynamo(path: Path) -> Trace:
    """Return all requests; a session's turns wait for each other.

    Raises ConfigError where Dynamo's own loader refuses the file.
    """
    builder, ids, request_ids = TraceBuilder("dynamo"), BlockIds(), set[str]()
    began_ms, block_tokens = None, 0
    for row in map(record_of, json_lines(path)):
        if (schema := row.text("schema")) != SCHEMA:
            raise row.error("schema", SCHEMA, schema)
        event = row.text("event_type")
        if event in _PASSED_OVER:
            builder.left_out[event] += 1
            continue
        if event != "request_end":
            raise row.error("event_type", "request_end, request_payload or tool_*", event)
        request = row.inner("request")
        replay = request.inner("replay")
        size = replay.count("trace_block_size", minimum=1)
        if block_tokens not in (0, size):
            raise replay.error("trace_block_size", f"{block_tokens} as before", size)
        block_tokens = size
        received_ms = request.count("request_received_ms")
        began_ms = received_ms if began_ms is None else began_ms
        arrival = _arrival(row, request, replay, float(received_ms), ids)
        if arrival.request_id in request_ids:
            raise request.error("request_id", "an id that no other has", arrival.request_id)
        if builder.arrivals and bool(builder.arrivals[0].session_id) != bool(arrival.session_id):
            raise row.error("agent_context", "one in every request or in none", "both")
        request_ids.add(arrival.request_id)
        builder.arrivals.append(arrival)
    return _since_first(builder, max(1, block_tokens))


def _arrival(row: Fields, request: Fields, replay: Fields, at_ms: float, ids: BlockIds) -> Arrival:
    tokens, size = replay.count("input_length"), replay.count("trace_block_size")
    hashes = replay.counts("input_sequence_hashes")
    if len(hashes) != blocks_of(tokens, size):
        expected = f"{blocks_of(tokens, size)} for {tokens} tokens in blocks of {size}"
        raise replay.error("input_sequence_hashes", expected, len(hashes))
    context = row.inner("agent_context") if row.has("agent_context") else None
    return Arrival(
        at_ms=at_ms,
        prompt_tokens=tokens,
        output_tokens=request.count("output_tokens"),
        blocks=ids.of(hashes),
        request_id=request.text("request_id"),
        session_id=context.text("session_id") if context else "",
        model=request.text("model") if request.has("model") else "",
        ttft_ms=request.number("ttft_ms") if request.has("ttft_ms") else None,
        total_ms=_total_ms(row, request, at_ms),
    )


def _total_ms(row: Fields, request: Fields, received_ms: float) -> float:
    if request.has("total_time_ms"):
        return request.number("total_time_ms")
    return max(0.0, row.count("event_time_unix_ms") - received_ms)


def _since_first(builder: TraceBuilder, block_tokens: int) -> Trace:
    began_ms = min((arrival.at_ms for arrival in builder.arrivals), default=0.0)
    builder.arrivals = [
        replace(arrival, at_ms=arrival.at_ms - began_ms) for arrival in builder.arrivals
    ]
    return builder.build(block_tokens=block_tokens, began_unix_ms=int(began_ms))


def dynamo_lines(trace: Trace, model: str) -> Iterator[str]:
    """Yield a `request_end` row per request; prompts without block ids share no prefix.

    Raises ConfigError where only some requests have a session.
    """
    sessions = {bool(arrival.session_id) for arrival in trace.arrivals}
    if len(sessions) > 1:
        raise ConfigError(
            "expected a session for every request or for none, found both, which Dynamo refuses"
        )
    next_hash = _OWN_HASHES
    for arrival, _ in with_delays(trace):
        count = blocks_of(arrival.prompt_tokens, trace.block_tokens)
        hashes = [
            *arrival.blocks[:count],
            *range(next_hash, next_hash + count - len(arrival.blocks)),
        ]
        next_hash += count
        received_ms = trace.began_unix_ms + round(arrival.at_ms)
        request: dict[str, Any] = {
            "request_id": arrival.request_id,
            "model": arrival.model or model,
            "input_tokens": arrival.prompt_tokens,
            "output_tokens": arrival.output_tokens,
            "request_received_ms": received_ms,
            "ttft_ms": arrival.ttft_ms,
            "total_time_ms": arrival.total_ms,
            "replay": {
                "trace_block_size": trace.block_tokens,
                "input_length": arrival.prompt_tokens,
                "input_sequence_hashes": hashes,
            },
        }
        row: dict[str, Any] = {
            "schema": SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": received_ms + round(arrival.total_ms or 0.0),
            "request": {name: value for name, value in request.items() if value not in (None, "")},
        }
        if arrival.session_id:
            row["agent_context"] = {"session_id": arrival.session_id}
        yield json.dumps(row)
