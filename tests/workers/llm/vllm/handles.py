"""KV handles as a vLLM peer sends them, and the gate that they pass."""

import json
from typing import Any

from schemas.records import KvHandle
from workers.llm.vllm.check import HandleGate, prefix_mark

PROMPT = [*range(40)]
MARK = {"prefix_key": "p", "prefix_mark": prefix_mark(PROMPT, "p")}  # as the handle's maker adds it
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "r1-abcd0123",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def handle(**changes: Any) -> KvHandle:
    """A good handle of PROMPT; `params` changes single parameters, None removes one."""
    params = {**PARAMS, **MARK, **changes.pop("params", {})}
    params = {name: value for name, value in params.items() if value is not None}
    fields: dict[str, Any] = {
        "worker_id": "prefill-0",
        "worker_epoch": 5,
        "engine_id": "engine-p",
        "engine_request_id": "r1-abcd0123",
        "tokens": 40,
        "block_size": 32,
        "block_ids": (3, 4),
        "expires_at_ms": 1_000,
        "params": json.dumps(params).encode(),
    }
    return KvHandle(**{**fields, **changes})


def gate() -> HandleGate:
    return HandleGate(engine_id="engine-d", block_size=32)


def kept_handle(tokens: list[int], **changes: Any) -> KvHandle:
    """A decode engine's KV of the first 40 of these tokens; `params` changes single parameters."""
    decode_params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_blocks_expiry_time": 17.5,
        "prefix_key": "k",
        "prefix_mark": prefix_mark(tokens[:40], "k"),
    }
    return handle(**{**changes, "params": {**decode_params, **changes.pop("params", {})}})


PEER = {"remote_host": "localhost", "remote_port": 5600, "tp_size": 1}
