"""What vLLM must never see: jobs and handles that are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas import prefix
from schemas.errors import KvUnavailable, StaleEpoch
from tests.workers.llm.engines import job
from tests.workers.llm.vllm.handles import (
    MARK,
    PARAMS,
    PEER,
    PROMPT,
    gate,
    handle,
    kept_handle,
)
from workers.llm.vllm.check import HandleGate, check_params, job_problem, prefix_mark, rest_of


def test_gate_accepts_valid_handle_once() -> None:
    handle_gate = gate()
    params = handle_gate.use(handle(), PROMPT, now_ms=999)
    assert params == {k: v for k, v in PARAMS.items() if k != "remote_blocks_expiry_time"}
    with pytest.raises(KvUnavailable, match="already used once"):
        handle_gate.use(handle(), PROMPT, now_ms=999)


def test_kv_of_another_adapter_is_refused() -> None:
    marks = {"prefix_mark": prefix_mark(PROMPT, "p", "ada")}
    assert gate().use(handle(params=marks), PROMPT, now_ms=999, adapter="ada")
    for adapter in ("", "bob"):
        with pytest.raises(KvUnavailable, match="expected KV of the prompt's own tokens"):
            gate().use(handle(params=marks), PROMPT, now_ms=999, adapter=adapter)
    with pytest.raises(KvUnavailable, match="expected KV of the prompt's own tokens"):
        gate().use(handle(), PROMPT, now_ms=999, adapter="ada")
    tokens = [*range(50)]
    kept_marks = {"prefix_mark": prefix_mark(tokens[:40], "k", "ada")}
    assert gate().use_kept(kept_handle(tokens, params=kept_marks), tokens, 999, "ada")
    with pytest.raises(KvUnavailable, match="expected KV of the prompt's own tokens"):
        gate().use_kept(kept_handle(tokens, params=kept_marks), tokens, 999)


def test_check_params_drops_unknown_parameters() -> None:
    assert "_p_side_truncated" not in check_params(handle(params={"_p_side_truncated": True}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"params": {name: None}} for name, value in PARAMS.items() if value is not None),
        *({"params": {name: None}} for name in MARK),
        {"params": {"prefix_mark": prefix_mark([*PROMPT[:-1], 0], "p")}},
        {"params": {"prefix_key": "another"}},
        {"params": {"remote_block_ids": []}},
        {"params": {"remote_block_ids": [[]]}},
        {"params": {"remote_block_ids": [3, 4]}},
        {"params": {"remote_block_ids": [[3, "4"]]}},
        {"params": {"remote_block_ids": [[3, -4]]}},
        {"params": {"remote_block_ids": [[3, True]]}},
        {"params": {"remote_block_ids": [[3]]}},
        {"params": {"remote_block_ids": [[3, 4], [5]]}},  # every group counts
        {"params": {"remote_block_ids": [[3, 4], [5, 6]]}},
        {"params": {"remote_port": "5600"}},
        {"params": {"remote_port": True}},
        {"params": {"remote_port": 0}},
        {"params": {"remote_port": 70_000}},
        {"params": {"remote_host": ""}},
        {"params": {"tp_size": 0}},
        *({"params": {name: 4_097}} for name in ("tp_size", "dcp_size", "pp_size")),
        {"params": {"remote_host": "\ud800"}},  # this and the numbers around:
        {"params": {"remote_block_ids": [[3, 2**31]]}},
        {"params": b"[" * 100_000},
        {"params": {"do_remote_prefill": False}},
        {"params": {"do_remote_decode": True}},
        {"params": {"transfer_mode": "push"}},
        {"params": {"remote_engine_id": "another"}},
        {"params": {"remote_request_id": "another"}},
        {"params": {"remote_num_tokens": 41}},
        {"params": b""},
        {"params": b"[]"},
        {"params": b"{"},
        {"tokens": 41},
        {"block_size": 16},
        {"engine_id": "engine-d"},
        {"expires_at_ms": 900},
    ],
)
def test_gate_refuses_invalid_handle(changes: dict[str, Any]) -> None:
    handle_gate = gate()
    raw = changes.get("params")
    bad = replace(handle(), params=raw) if isinstance(raw, bytes) else handle(**changes)
    with pytest.raises(KvUnavailable):
        handle_gate.use(bad, PROMPT, now_ms=900)
    handle_gate.use(handle(), PROMPT, now_ms=900)  # and leaves no trace


def test_gate_refuses_own_kv() -> None:
    own_handle = handle(engine_id="engine-d", params={"remote_engine_id": "engine-d"})
    with pytest.raises(KvUnavailable, match="another engine's"):
        gate().use(own_handle, PROMPT, now_ms=0)


def test_gate_refuses_kv_of_earlier_epoch() -> None:
    handle_gate = gate()
    handle_gate.observe_epoch("prefill-0", 6)
    with pytest.raises(StaleEpoch, match="expected epoch 6"):
        handle_gate.use(handle(), PROMPT, now_ms=0)
    handle_gate.use(handle(worker_epoch=6), PROMPT, now_ms=0)


def test_gate_refuses_kv_of_other_tokens_with_same_block_hash() -> None:
    """A lattice's short vectors give such tokens within seconds."""
    shifts = [13, 1, -27, -2, -14, -6, 15, -10, -12, -2, -17, 13]
    other_tokens = [1_000] * 60
    own_tokens = [*(1_000 + shift for shift in shifts), *other_tokens[12:]]
    assert prefix.chain(other_tokens, 40).tolist() == prefix.chain(own_tokens, 40).tolist()
    with pytest.raises(KvUnavailable, match="expected KV of the prompt's own tokens"):
        gate().use_kept(kept_handle(other_tokens), own_tokens, now_ms=0)


def test_gate_accepts_kept_kv_once_for_continued_prompt() -> None:
    handle_gate, tokens = gate(), [*range(60)]
    params = handle_gate.use_kept(kept_handle(tokens), tokens, now_ms=999)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_blocks_expiry_time"] == 17.5
    assert not {"prefix_key", "prefix_mark"} & params.keys()
    with pytest.raises(KvUnavailable, match="already used once"):
        handle_gate.use_kept(kept_handle(tokens), tokens, now_ms=999)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, [*range(40)]),  # of which the last must be computed
        ({}, [*range(39), 7, *range(40, 60)]),
        ({}, [7, *range(1, 60)]),
        ({"params": {"prefix_key": None}}, [*range(60)]),
        ({"params": {"prefix_mark": None}}, [*range(60)]),
        ({"params": {"prefix_key": "another"}}, [*range(60)]),
        ({"params": {"remote_blocks_expiry_time": None}}, [*range(60)]),
        ({"params": {"remote_block_ids": [[3, 4, 5]]}}, [*range(60)]),
        ({"params": {"do_remote_prefill": True}}, [*range(60)]),
        ({"params": {"do_remote_decode": False}}, [*range(60)]),
        ({"block_size": 16}, [*range(60)]),
        ({"expires_at_ms": 900}, [*range(60)]),
    ],
)
def test_gate_refuses_kept_kv_of_other_conversation(
    changes: dict[str, Any], tokens: list[int]
) -> None:
    handle_gate, kept_tokens = gate(), [*range(60)]
    with pytest.raises(KvUnavailable):
        handle_gate.use_kept(kept_handle(kept_tokens, **changes), tokens, now_ms=900)
    handle_gate.use_kept(kept_handle(kept_tokens), kept_tokens, now_ms=900)  # and leaves no trace


def test_gate_distinguishes_kept_handles_from_prompt_handles() -> None:
    tokens = [*range(60)]
    with pytest.raises(KvUnavailable):
        gate().use(kept_handle(tokens), PROMPT, now_ms=0)
    with pytest.raises(KvUnavailable):
        gate().use_kept(handle(), tokens, now_ms=0)


def test_gate_promise_names_peer() -> None:
    handle_gate = HandleGate(engine_id="engine-d", block_size=32, mode="push")
    promised = handle(block_ids=(), params={}, engine_request_id="r1.1")
    params = handle_gate.promise(promised, 40, json.dumps(PEER).encode(), now_ms=999)
    assert params == {
        **PEER,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_request_id": "r1.1",
        "remote_num_tokens": 40,
    }


@pytest.mark.parametrize(
    ("peer", "tokens"),
    [
        (None, 40),
        (b"", 40),
        ({**PEER, "remote_port": 0}, 40),
        ({**PEER, "remote_host": None}, 40),
        ({**PEER, "tp_size": 0}, 40),
        (PEER, 41),
    ],
)
def test_gate_refuses_promise_of_unknown_peer(peer: Any, tokens: int) -> None:
    metadata = json.dumps(peer).encode() if isinstance(peer, dict) else peer
    with pytest.raises(KvUnavailable):
        gate().promise(handle(), tokens, metadata, now_ms=0)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, ""),
        ({"prompt_tokens": [1] * 99}, ""),
        ({"prompt_tokens": []}, "invalid_request"),
        ({"prompt_tokens": [1] * 100}, "context_length_exceeded"),
        ({"prompt_tokens": [1, -1]}, "invalid_request"),
        ({"prompt_tokens": [1, 500]}, "invalid_request"),
        ({"max_tokens": 0}, "invalid_request"),
        ({"max_tokens": 4, "min_tokens": 5}, "invalid_request"),
    ],
)
def test_job_problem_names_error_code(fields: dict[str, Any], code: str) -> None:
    checked_job = job(fields.pop("prompt_tokens", [1, 2, 3]), **fields)
    error = job_problem(checked_job, max_model_len=100, vocab_size=500)
    assert (error.code if error else "") == code


def test_rest_of_job_excludes_prior_tokens() -> None:
    """The seed of the rest depends on the job's seed and the position in the answer."""
    first_job = job(range(9), prior_tokens=4, max_tokens=12, min_tokens=6, seed=3)
    rest = rest_of(first_job)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (8, 2)
    assert rest.prompt_tokens == first_job.prompt_tokens and rest.request_id == first_job.request_id
    assert rest.sampling.seed == rest_of(first_job).sampling.seed != 3
    later_job = job(range(9), prior_tokens=5, max_tokens=12, min_tokens=2, seed=3)
    assert rest_of(later_job).sampling.seed != rest.sampling.seed
    assert rest_of(later_job).sampling.min_tokens == 0
    whole = job(range(9))
    assert rest_of(whole) is whole
