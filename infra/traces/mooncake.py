"""Reads and writes Mooncake's JSON lines, and reads agentic Mooncake version 2.

A line is a request: timestamp in ms, input_length, output_length, hash_ids of blocks of 512 tokens.
Fields that Dynamo and aiperf add are read too: session_id, delay after the previous turn,
request_id, model, policy_class, wait_for with tool_wait_ms. Version 2 begins with a header with the
block size; its rows have typed dependencies, and block ids that are local to one play.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.traces.fields import Fields, json_lines
from infra.traces.trace import (
    BLOCK_TOKENS,
    After,
    Arrival,
    BlockIds,
    Trace,
    TraceBuilder,
    reblock,
    with_delays,
)
from schemas.records import Priority

AGENTIC, AGENTIC_VERSION = "dynamo.agentic_mooncake", 2
TRIGGERS = ("dispatch", "completion")
RELATIONS = ("sequence", "spawn", "join", "replay_barrier")
_CLASSES = [priority.value for priority in Priority]


def read_mooncake(path: Path) -> Trace:
    """Return the requests; a later turn without a time is due its delay after the previous turn."""
    builder, last = TraceBuilder("mooncake"), dict[str, Arrival]()
    for number, row in enumerate(json_lines(path)):
        arrival = _arrival(row, f"r{number}", last)
        if arrival.session_id:
            last[arrival.session_id] = arrival
        builder.arrivals.append(arrival)
    return builder.build()


def _arrival(row: Fields, name: str, last: dict[str, Arrival]) -> Arrival:
    session_id = row.text("session_id") if row.has("session_id") else ""
    before = last.get(session_id)
    delay_ms = row.number("delay", "delay_ms") if row.has("delay", "delay_ms") else 0.0
    if row.has("timestamp", "created_time"):
        at_ms = row.number("timestamp", "created_time")
    elif before is not None or row.has("wait_for"):
        at_ms = (before.at_ms if before else 0.0) + delay_ms
    else:
        at_ms = row.number("timestamp")  # raises an error for the missing time
    after: tuple[After, ...] = ()
    if row.has("wait_for"):
        after = _waits(row, delay_ms)
    elif before is not None and delay_ms:
        after = (After(request_id=before.request_id, delay_ms=delay_ms),)
    return Arrival(
        at_ms=at_ms,
        request_id=row.text("request_id") if row.has("request_id") else name,
        session_id=session_id,
        after=after,
        **_lengths(row),
    )


def _lengths(row: Fields) -> dict[str, Any]:
    if row.has("messages", "text_input"):
        raise row.error("input_length", "lengths and hash_ids; texts are not read", "a text")
    policy_class = row.text("policy_class") if row.has("policy_class") else ""
    return {
        "prompt_tokens": row.count("input_length", "input_tokens"),
        "output_tokens": row.count("output_length", "output_tokens"),
        "blocks": row.counts("hash_ids") if row.has("hash_ids") else (),
        "model": row.text("model") if row.has("model") else "",
        "priority": policy_class if policy_class in _CLASSES else "",
    }


def _waits(row: Fields, delay_ms: float) -> tuple[After, ...]:
    names = row.values["wait_for"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise row.error("wait_for", "a list of request ids", names)
    if row.has("tool_wait_ms"):
        delay_ms += row.number("tool_wait_ms")
    return tuple(After(request_id=name, delay_ms=delay_ms) for name in names)


def read_agentic(path: Path) -> Trace:
    """Return the requests after the header, which may wait for others of their play."""
    rows = json_lines(path)
    block_tokens = _header(next(rows))
    builder, ids, request_ids = TraceBuilder("agentic"), BlockIds(), set[str]()
    for row in rows:
        request_id, play = row.text("request_id"), row.text("play_id")
        if request_id in request_ids:
            raise row.error("request_id", "an id that no other row has", request_id)
        request_ids.add(request_id)
        lengths = _lengths(row)
        lengths["blocks"] = ids.of((play, block) for block in lengths["blocks"])
        builder.arrivals.append(
            Arrival(
                at_ms=row.number("not_before_ms"),
                request_id=request_id,
                session_id=row.text("session_id"),
                after=tuple(_after(dependency) for dependency in row.objects("dependencies")),
                **lengths,
            )
        )
    return builder.build(block_tokens=block_tokens)


def _header(row: Fields) -> int:
    version = row.count("version")
    if version != AGENTIC_VERSION:
        raise row.error("version", str(AGENTIC_VERSION), version)
    if (scope := row.text("hash_id_scope")) != "local":
        raise row.error("hash_id_scope", "local", scope)
    return row.count("block_size", minimum=1)


def _after(row: Fields) -> After:
    trigger, relation = row.text("trigger"), row.text("relation")
    if trigger not in TRIGGERS:
        raise row.error("trigger", " or ".join(TRIGGERS), trigger)
    if relation not in RELATIONS:
        raise row.error("relation", " or ".join(RELATIONS), relation)
    return After(
        request_id=row.text("request_id"),
        delay_ms=row.number("delay_ms"),
        trigger=trigger,
        relation=relation,
    )


def mooncake_lines(trace: Trace, model: str) -> Iterator[str]:
    """Yield lines in Mooncake's format, with sessions, delays and classes where there are any.

    Its readers assume blocks of 512 tokens.
    """
    if trace.block_tokens != BLOCK_TOKENS:
        trace = reblock(trace, BLOCK_TOKENS)
    for arrival, delay_ms in with_delays(trace):
        row: dict[str, Any] = {
            "timestamp": whole(arrival.at_ms),
            "input_length": arrival.prompt_tokens,
            "output_length": arrival.output_tokens,
            "hash_ids": list(arrival.blocks),
        }
        if arrival.session_id:
            row["session_id"] = arrival.session_id
        if delay_ms is not None:
            row["delay"] = whole(delay_ms)
        if arrival.priority:
            row["policy_class"] = arrival.priority
        yield json.dumps(row)


def whole(value: float) -> float | int:
    """Return a whole number as int, another one rounded to 3 digits."""
    return int(value) if value.is_integer() else round(value, 3)
