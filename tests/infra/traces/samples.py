"""Small traces in each format, as their own documentation writes them."""

import json
from pathlib import Path
from typing import Any

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,0\n"
)
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,,,ChatGPT,472,18,490,API log\n"
    "45.5,12,3.25,GPT-4,1087,230,1317,Conversation log\n"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1_200, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 105, "input_length": 1_800, "output_length": 26, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 274.5, "input_length": 300, "output_length": 5, "hash_ids": [5]},
]
SESSIONS = [
    {"session_id": "a", "timestamp": 1_000, "input_length": 600, "output_length": 9,
     "hash_ids": [1, 2], "policy_class": "interactive"},
    {"session_id": "a", "delay_ms": 50, "input_tokens": 1_200, "output_tokens": 7,
     "hash_ids": [1, 3, 4]},
]  # fmt: skip
AGENTIC: list[dict[str, Any]] = [
    {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local",
     "source": {"format": "weka", "digest": "d"}},
    {"request_id": "p:0", "play_id": "p", "session_id": "p", "model": "m", "input_length": 100,
     "output_length": 4, "hash_ids": [1, 2], "not_before_ms": 0.0},
    {"request_id": "p:1", "play_id": "p", "session_id": "p-sub", "model": "m", "input_length": 64,
     "output_length": 2, "hash_ids": [1], "not_before_ms": 0.0,
     "dependencies": [{"request_id": "p:0", "trigger": "dispatch", "delay_ms": 20.0,
                       "relation": "spawn"}]},
    {"request_id": "q:0", "play_id": "q", "session_id": "q", "model": "m", "input_length": 64,
     "output_length": 2, "hash_ids": [1], "not_before_ms": 30.0},
]  # fmt: skip


def request_end(number: int, **changes: Any) -> dict[str, Any]:
    """Return a request trace row in Dynamo's format: 100 prompt tokens, blocks of 64."""
    replay = {
        "trace_block_size": 64,
        "input_length": 100,
        "input_sequence_hashes": [14_879_255_164_371_896_291, 100 + number],
    }
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": 1_777_312_801_000 + number,
        "request": {
            "request_id": f"d{number}",
            "request_received_ms": 1_777_312_800_000 + number,
            "output_tokens": 16,
            "replay": replay | changes.pop("replay", {}),
        },
        **changes,
    }


def span(name: str, start_ns: int, **attributes: Any) -> dict[str, Any]:
    """Return a span of OTLP JSON, with 64-bit numbers as texts and `__` for dots."""

    def value(attribute: Any) -> dict[str, Any]:
        if isinstance(attribute, int):
            return {"intValue": str(attribute)}
        return (
            {"doubleValue": attribute}
            if isinstance(attribute, float)
            else {"stringValue": attribute}
        )

    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": name,
        "name": name,
        "kind": 3,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + 2_000_000_000),
        "attributes": [
            {"key": key.replace("__", "."), "value": value(attribute)}
            for key, attribute in attributes.items()
        ],
    }


def spans(*rows: dict[str, Any]) -> dict[str, Any]:
    """Return a document of OTLP JSON with these spans."""
    scope = {"scope": {"name": "s"}, "spans": list(rows)}
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]}


def written(folder: Path, rows: list[dict[str, Any]], name: str = "trace.jsonl") -> Path:
    """Write a file of JSON lines."""
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
