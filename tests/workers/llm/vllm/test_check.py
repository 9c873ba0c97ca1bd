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


def test_a_good_handle_passes_once() -> None:
    one = gate()
    params = one.use(handle(), PROMPT, now_ms=999)
    assert params == {k: v for k, v in PARAMS.items() if k != "remote_blocks_expiry_time"}
    with pytest.raises(KvUnavailable, match="already used once"):
        one.use(handle(), PROMPT, now_ms=999)


def test_unknown_parameters_are_dropped() -> None:
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
def test_a_bad_handle_is_refused(changes: dict[str, Any]) -> None:
    one = gate()
    raw = changes.get("params")
    bad = replace(handle(), params=raw) if isinstance(raw, bytes) else handle(**changes)
    with pytest.raises(KvUnavailable):
        one.use(bad, PROMPT, now_ms=900)
    one.use(handle(), PROMPT, now_ms=900)  # and leaves no trace


def test_own_kv_is_not_fetched() -> None:
    mine = handle(engine_id="engine-d", params={"remote_engine_id": "engine-d"})
    with pytest.raises(KvUnavailable, match="another engine's"):
        gate().use(mine, PROMPT, now_ms=0)


def test_kv_of_an_earlier_life_is_refused() -> None:
    one = gate()
    one.observe_epoch("prefill-0", 6)
    with pytest.raises(StaleEpoch, match="expected epoch 6"):
        one.use(handle(), PROMPT, now_ms=0)
    one.use(handle(worker_epoch=6), PROMPT, now_ms=0)


def test_kv_behind_other_tokens_with_the_same_block_hash_is_refused() -> None:
    """Such tokens are found in seconds: a lattice's short vectors."""
    shifts = [13, 1, -27, -2, -14, -6, 15, -10, -12, -2, -17, 13]
    theirs = [1_000] * 60
    ours = [*(1_000 + shift for shift in shifts), *theirs[12:]]
    assert prefix.chain(theirs, 40).tolist() == prefix.chain(ours, 40).tolist()
    with pytest.raises(KvUnavailable, match="expected KV of the prompt's own tokens"):
        gate().use_kept(kept_handle(theirs), ours, now_ms=0)


def test_kept_kv_passes_once_for_a_prompt_that_goes_on_with_it() -> None:
    one, tokens = gate(), [*range(60)]
    params = one.use_kept(kept_handle(tokens), tokens, now_ms=999)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_blocks_expiry_time"] == 17.5
    assert not {"prefix_key", "prefix_mark"} & params.keys()
    with pytest.raises(KvUnavailable, match="already used once"):
        one.use_kept(kept_handle(tokens), tokens, now_ms=999)


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
def test_kept_kv_of_another_conversation_is_refused(
    changes: dict[str, Any], tokens: list[int]
) -> None:
    one, own = gate(), [*range(60)]
    with pytest.raises(KvUnavailable):
        one.use_kept(kept_handle(own, **changes), tokens, now_ms=900)
    one.use_kept(kept_handle(own), own, now_ms=900)  # and leaves no trace


def test_a_kept_handle_is_no_prompts_and_the_other_way_round() -> None:
    tokens = [*range(60)]
    with pytest.raises(KvUnavailable):
        gate().use(kept_handle(tokens), PROMPT, now_ms=0)
    with pytest.raises(KvUnavailable):
        gate().use_kept(handle(), tokens, now_ms=0)


def test_a_promise_names_its_peer() -> None:
    one = HandleGate(engine_id="engine-d", block_size=32, mode="push")
    promised = handle(block_ids=(), params={}, engine_request_id="r1.1")
    params = one.promise(promised, 40, json.dumps(PEER).encode(), now_ms=999)
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
def test_a_promise_of_nobody_is_refused(peer: Any, tokens: int) -> None:
    known = json.dumps(peer).encode() if isinstance(peer, dict) else peer
    with pytest.raises(KvUnavailable):
        gate().promise(handle(), tokens, known, now_ms=0)


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
def test_jobs(fields: dict[str, Any], code: str) -> None:
    one = job(fields.pop("prompt_tokens", [1, 2, 3]), **fields)
    error = job_problem(one, max_model_len=100, vocab_size=500)
    assert (error.code if error else "") == code


def test_what_was_said_of_an_answer_counts_no_more() -> None:
    """Its draws go on from the seed and the place, the same wherever that is."""
    one = job(range(9), prior_tokens=4, max_tokens=12, min_tokens=6, seed=3)
    rest = rest_of(one)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (8, 2)
    assert rest.prompt_tokens == one.prompt_tokens and rest.request_id == one.request_id
    assert rest.sampling.seed == rest_of(one).sampling.seed != 3
    other = job(range(9), prior_tokens=5, max_tokens=12, min_tokens=2, seed=3)
    assert rest_of(other).sampling.seed != rest.sampling.seed
    assert rest_of(other).sampling.min_tokens == 0
    whole = job(range(9))
    assert rest_of(whole) is whole
