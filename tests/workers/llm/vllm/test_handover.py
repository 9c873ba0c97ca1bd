"""Handles of KV that vLLM holds: how long, and how many are left."""

import pytest

from schemas.errors import KvUnavailable
from schemas.records import Capability
from tests.workers.llm.vllm.handles import PARAMS, PROMPT, gate
from workers.llm.vllm.handover import Handover
from workers.llm.vllm.settings import VllmSettings


def test_handover_expires_handles_before_lease_and_counts_them() -> None:
    capability = Capability(
        model="m",
        engine="vllm",
        engine_id="engine-p",
        block_size=32,
        max_model_len=100,
        running_max=4,
    )
    settings = VllmSettings(kv_lease_s=30, handle_margin_ms=5_000)
    handover = Handover(settings, capability, worker_id="prefill-0", worker_epoch=5)
    kv_handle = handover.handle("r1", PARAMS, PROMPT, now_ms=1_000)
    assert kv_handle.expires_at_ms == 26_000
    assert (kv_handle.tokens, kv_handle.block_ids, kv_handle.engine_request_id) == (
        40,
        (3, 4),
        "r1-abcd0123",
    )
    with pytest.raises(KvUnavailable, match="prompt's own tokens"):
        gate().use(kv_handle, [*PROMPT[:-1], 0], now_ms=25_999)
    assert gate().use(kv_handle, PROMPT, now_ms=25_999)
    handover.handle("r2", {**PARAMS, "remote_request_id": "r2-00000000"}, PROMPT, now_ms=2_000)
    assert handover.count_handles(30_999, kv_usage=0.1) == 2
    assert handover.count_handles(31_000, kv_usage=0.1) == 1
    assert handover.take_back("r2") == "r2-00000000"
    assert handover.take_back("r2") == ""
    handover.handle("r3", PARAMS, PROMPT, now_ms=3_000)
    assert handover.count_handles(3_001, kv_usage=0.0) == 0  # all memory is free, so it was read
    assert handover.total == 3


def test_handover_keeps_answer_kv_for_next_turn() -> None:
    capability = Capability(
        model="m",
        engine="vllm",
        engine_id="engine-p",
        block_size=32,
        max_model_len=100,
        running_max=4,
    )
    settings = VllmSettings(keep_decoded_kv_ms=9_000)
    handover = Handover(settings, capability, worker_id="decode-0", worker_epoch=5)
    returned = {
        **PARAMS,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_blocks_expiry_time": 3.5,
    }
    tokens = [*range(41)]
    kv_handle = handover.answer_handle("r1", returned, tokens, now_ms=1_000)
    assert kv_handle is not None
    assert (kv_handle.tokens, kv_handle.expires_at_ms) == (40, 5_000)
    assert gate().use_kept(kv_handle, [*tokens, 1, 2], now_ms=4_999)
    assert handover.count_handles(9_999, kv_usage=0.1) == 1
    assert handover.count_handles(10_000, kv_usage=0.1) == 0
    assert handover.answer_handle("r2", returned, tokens[:39], now_ms=0) is None
    assert (
        handover.answer_handle("r3", {**returned, "remote_block_ids": [[1]]}, tokens, now_ms=0)
        is None
    )
