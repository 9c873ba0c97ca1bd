"""KV handles as nobody means them: each passes whole, or is refused with its layer's errors and
leaves no trace."""

import dataclasses
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, KvUnavailable, PromptTooLong, StaleEpoch, TriviumError
from schemas.records import KvHandle, Sampling
from tests.fuzz.strategies import JSON, changed_bytes, examples, text_of
from tests.schemas.examples import instances
from tests.workers.llm.engines import PREFILL, answered, job, prompt, start_sim
from tests.workers.llm.vllm.handles import MARK, PARAMS, PROMPT, gate, handle
from workers.llm.sim.handles import HandleRules
from workers.llm.vllm.check import PREFIX_KEY, PREFIX_MARK, HandleGate, job_problem, prefix_mark

BLOCKS = 2
REFUSED = (KvUnavailable, StaleEpoch)
EDGES = st.sampled_from([-(2**31), -64, -32, -1, 0, 1, 32, 39, 40, 41, 64, 2**31 - 1])
DEEP = b"[" * 5_000
MADE = {**PARAMS, **MARK}
KEPT = {
    **PARAMS,
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_blocks_expiry_time": 9.5,
    PREFIX_KEY: "k",
    PREFIX_MARK: prefix_mark(PROMPT, "k"),
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "worker_id": st.sampled_from(["prefill-0", "", "decode-0", "x" * 2_000]),
    "worker_epoch": EDGES,
    "engine_id": st.sampled_from(["engine-p", "engine-d", "", "\x00"]),
    "engine_request_id": st.sampled_from(["r1-abcd0123", "", "another"]),
    "tokens": EDGES,
    "block_size": EDGES,
    "block_ids": st.lists(EDGES, max_size=3).map(tuple),
    "expires_at_ms": st.sampled_from([-(2**63), 0, 899, 900, 901, 2**63 - 1]),
}


def forged(params: dict[str, Any]) -> st.SearchStrategy[KvHandle]:
    """A good handle, with fields and parameters that somebody changed."""
    changed = st.dictionaries(
        st.sampled_from(sorted(params)) | st.text(max_size=5), JSON, max_size=2
    )
    raw = changed.map(lambda changes: text_of({**params, **changes}))
    bytes_of = raw | changed_bytes(json.dumps(params).encode()) | st.just(DEEP)
    return st.builds(
        lambda changes, data: dataclasses.replace(handle(), **{**changes, "params": data}),
        st.fixed_dictionaries({}, optional=FIELDS),
        st.just(json.dumps(params).encode()) | bytes_of,
    ) | instances("trivium.KvHandle")


def passes_or_is_refused(handle_gate: HandleGate, use: str, kv: KvHandle, *args: Any) -> None:
    try:
        params = getattr(handle_gate, use)(kv, *args)
    except REFUSED:
        assert not handle_gate._used
        return
    assert kv.expires_at_ms > 900 and kv.engine_id != "engine-d"
    assert (kv.engine_id, kv.engine_request_id) in handle_gate._used
    for field, value in params.items():
        assert isinstance(value, type(KEPT[field])), field
    assert params["remote_host"].isascii() and 0 < params["remote_port"] < 65_536
    assert all(0 < params.get(name, 1) <= 4_096 for name in ("tp_size", "dcp_size", "pp_size"))
    if groups := params.get("remote_block_ids", ()):
        assert [len(group) for group in groups] == [BLOCKS]
        assert all(0 <= block < 2**31 for group in groups for block in group)
    try:
        getattr(handle_gate, use)(kv, *args)
    except REFUSED:
        return
    raise AssertionError("a handle passed twice")


@examples(300)
@given(forged(MADE))
def test_handle_gate_refuses_forged_handles(kv: KvHandle) -> None:
    passes_or_is_refused(gate(), "use", kv, PROMPT, 900)


@examples(300)
@given(forged(KEPT))
def test_handle_gate_refuses_forged_prefix_handles(kv: KvHandle) -> None:
    passes_or_is_refused(gate(), "use_kept", kv, [*PROMPT, 41], 900)


@examples(300)
@given(forged(PARAMS), st.none() | forged(PARAMS).map(lambda kv: kv.params))
def test_handle_gate_refuses_forged_promises(kv: KvHandle, peer: bytes | None) -> None:
    passes_or_is_refused(gate(), "promise", kv, len(PROMPT), peer, 900)


@examples(300)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3) | st.just(PROMPT),
    instances("trivium.Sampling"),
    st.text(max_size=3),
)
def test_job_problem_reports_invalid_jobs(tokens: list[int], sampling: Sampling, name: str) -> None:
    engine_job = dataclasses.replace(job(tokens), request_id=name, sampling=sampling)
    error = job_problem(engine_job, max_model_len=64, vocab_size=500)
    if error is None:
        assert name and 0 < len(tokens) < 64 and sampling.max_tokens > 0
    else:
        assert isinstance(error, InvalidRequest | PromptTooLong)


@examples(300)
@given(st.lists(forged(PARAMS), min_size=1, max_size=4), st.integers(0, 2))
def test_simulated_engine_refuses_forged_handles(handles: list[KvHandle], kind: int) -> None:
    rules = HandleRules(32)
    rules.observe_epoch("prefill-0", 5, "engine-p")
    for kv in [*handles, handles[0]]:
        use = (rules.use, rules.use_promise, rules.use_target)[kind]
        before = dict(rules._used)
        error: TriviumError | None = use(kv, len(PROMPT), 900)
        if error is not None:
            assert isinstance(error, REFUSED) and rules._used == before
            continue
        assert (kv.engine_id, kv.engine_request_id) not in before
        assert kv.expires_at_ms > 900 and kv.block_size == 32 and 0 <= kv.tokens <= len(PROMPT)
        assert len(kv.block_ids) in (0, BLOCKS)


async def test_engine_copies_only_blocks_of_handle() -> None:
    engine = await start_sim()
    try:
        other_prompt = prompt(40, salt=1)
        right = await answered(engine, job(other_prompt))
        for wrong in (-1, 9, 2**31 - 1):
            first = job(prompt(40), PREFILL)
            kv = (await answered(engine, first)).last.kv
            assert kv is not None
            false = dataclasses.replace(kv, block_ids=(wrong,) * len(kv.block_ids))
            answer = await answered(
                engine, job(other_prompt, request_id=first.request_id, kv=false)
            )
            assert answer.error_code == "kv_unavailable" or answer.token_ids == right.token_ids
    finally:
        await engine.close()
