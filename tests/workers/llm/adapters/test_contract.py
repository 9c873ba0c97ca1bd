"""What every engine does with LoRA adapters: each answers for itself, also beside others, handed
over or continued, and shares no KV."""

import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import EngineFailed, UnknownModel
from schemas.prefix import chain, salt_of
from schemas.records import Orchestration
from tests.waits import until
from tests.workers.llm.engine_pair import Pair
from tests.workers.llm.engines import (
    PREFILL,
    answered,
    collected,
    handed_over,
    job,
    paired,
    start_sim,
    start_vllm,
)
from tests.workers.llm.engines import prompt as make_prompt
from tests.workers.llm.worker_in_memory import WorkerInMemory
from workers.llm.engine import Engine
from workers.models.folder import make_tiny_model
from workers.models.random_adapters import make_adapter

NAMES = tuple(f"ada-{number}" for number in range(9))  # one more than stay loaded
BATCH_MAX, LOADED_MAX = 2, 8
A, B, C = NAMES[:3]


async def start_keeping(**fields: Any) -> Any:
    """An engine that can keep decoded KV, and does so in the test that is about it."""
    engine: Any = await start_vllm(keep_decoded_kv_ms=60_000, **fields)
    engine._receiver._keeps = False
    return engine


STARTS: dict[str, Callable[..., Awaitable[Any]]] = {
    "sim": start_sim,
    "sim-nixl": lambda **fields: start_sim(transfer="nixl", **fields),
    "vllm": start_keeping,
    "vllm-push": lambda **fields: start_vllm(kv_transfer="push", **fields),
}
_VLLM = [pytest.mark.vllm, pytest.mark.timeout(1_800)]  # two engines start
_MARKS = {"vllm": _VLLM, "vllm-push": [*_VLLM, pytest.mark.slow]}  # a minute for each pair


@pytest.fixture(scope="module")
def folders(trivium_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    base = make_tiny_model(place / "models")
    return {name: make_adapter(place / name, base, seed) for seed, name in enumerate(NAMES, 1)}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=_MARKS.get(name, [])) for name in STARTS],
)
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Pair]:
    """Engines with all adapters, shared by the tests here."""

    def start() -> Awaitable[Engine]:
        adapters = {name: str(folder) for name, folder in folders.items()}
        return STARTS[request.param](adapters=adapters, adapters_max=BATCH_MAX)

    own_pair = Pair.started(start)
    engines = own_pair.producer, own_pair.consumer
    metadata = {engine.capability.engine_id: engine.capability.nixl_metadata for engine in engines}
    for engine in engines:
        engine.set_peer_metadata(metadata.get)
    yield own_pair
    own_pair.close()


def is_real(pair: Pair) -> bool:
    return bool(pair.consumer.capability.engine == "vllm")


def test_job_has_adapter_of_its_work() -> None:
    worker = WorkerInMemory()
    worker.work("r1", adapter="ada", cache_scope="scope")
    worker.work("r2")
    assert [job.adapter for job in worker.engine.jobs] == ["ada", ""]


def test_worker_reports_adapters(pair: Pair) -> None:
    capability = pair.consumer.capability
    assert capability.adapters == NAMES
    assert capability.adapters_max == BATCH_MAX


def test_adapters_beside_each_other_answer_as_alone(pair: Pair) -> None:
    tokens = make_prompt(40, salt=301)
    alone = {name: pair.answer(prompt_tokens=tokens, adapter=name) for name in ("", A, B, C)}
    answers = [answer.token_ids for answer in alone.values()]
    assert len({*map(tuple, answers)}) == 4, "each changes the answer"
    jobs = [job(tokens, adapter=name) for name in (*alone, *alone)]  # more than a batch may use
    beside = pair.run(collected(pair.consumer, *jobs))
    assert [answer.token_ids for answer in beside] == answers * 2


def test_short_prompts_of_adapters_differ_too(pair: Pair) -> None:
    """Also where no block of the prompt is full, and where one is."""
    for tokens in (1, 16, 32):
        prompt = make_prompt(tokens, salt=302)
        answers = [pair.answer(prompt_tokens=prompt, adapter=name) for name in ("", A, B)]
        assert len({tuple(answer.token_ids) for answer in answers}) == 3, tokens


def test_adapters_share_no_cached_prefix(pair: Pair) -> None:
    """Whatever their scopes; within one, they do."""
    for scopes in (("", A, B), ("own", "own", "own")):
        tokens = make_prompt(300, salt=303 + len(scopes[0]))
        for turn in range(2):
            for name, scope in zip(("", A, B), scopes, strict=True):
                answer = pair.answer(prompt_tokens=tokens, adapter=name, cache_scope=scope)
                cached_tokens = answer.outputs[0].cached_tokens
                assert cached_tokens >= 256 if turn else not cached_tokens, (name, scope, turn)


def test_published_hashes_are_those_of_scope(pair: Pair) -> None:
    """Routers compute them from the request's scope alone, which differs by adapter."""
    tokens, blocks = make_prompt(300, salt=304), pair.consumer.block_log
    pair.answer(prompt_tokens=tokens, adapter=A, cache_scope=A)
    hashes = chain(tokens, blocks.block_size, salt_of(A)).tolist()
    pair.run(until(lambda: {*hashes} <= {*blocks.snapshot()}))
    assert not {*blocks.snapshot()} & {*chain(tokens, blocks.block_size).tolist()}


def test_unknown_adapter_is_refused(pair: Pair) -> None:
    answer = pair.answer(adapter="eve")
    assert answer.error_code == UnknownModel.code
    assert pair.answer(adapter=A).last.finish_reason == "length"


@pytest.mark.parametrize("tokens", [8, 300])
def test_hand_over_keeps_adapter(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, salt=305)
    local = pair.answer(prompt_tokens=prompt, adapter=A, cache_scope="x").token_ids
    prefilled, decoded = pair.run(
        handed_over(pair.consumer, pair.producer, prompt, adapter=A, cache_scope=A)
    )
    assert decoded.token_ids == local
    assert prefilled.token_ids == local[:1]
    assert decoded.outputs[0].kv_bytes, "it was read, not computed"
    assert decoded.outputs[0].kv_missed is None


def test_kv_of_another_adapter_is_not_used(pair: Pair) -> None:
    if not is_real(pair) or pair.consumer._settings.kv_transfer == "push":
        pytest.skip("only vLLM's handles carry a mark of their KV, and those that are read")
    prompt = make_prompt(300, salt=306)
    first = job(prompt, PREFILL, adapter=A)
    prefilled = pair.run(answered(pair.producer, first))
    second = job(prompt, request_id=first.request_id, kv=prefilled.last.kv, adapter=B)
    decoded = pair.run(answered(pair.consumer, second))
    assert decoded.outputs[0].kv_missed is not None
    assert decoded.token_ids == pair.answer(prompt_tokens=prompt, adapter=B).token_ids
    pair.producer.abort(first.request_id)


@pytest.mark.parametrize("name", [A, B])
def test_kept_kv_is_read_for_its_own_adapter_only(pair: Pair, name: str) -> None:
    if not is_real(pair) or pair.consumer._settings.kv_transfer == "push":
        pytest.skip("these engines keep no KV for the next turn")
    prompt, engines = make_prompt(300, salt=309), (pair.producer, pair.consumer)
    for engine in engines:
        engine._receiver._keeps = True
    try:
        fields: Any = {"adapter": A, "cache_scope": f"first {name}", "max_tokens": 20}
        _, decoded = pair.run(handed_over(*engines, prompt, **fields))
        assert decoded.last.kv is not None
        second = [*prompt, *decoded.token_ids, *make_prompt(30, salt=310)]
        turn = job(second, PREFILL, kv=decoded.last.kv, adapter=name, cache_scope=f"next {name}")
        prefilled = pair.run(answered(pair.producer, turn))
        pair.producer.abort(turn.request_id)
        pair.consumer.abort(decoded.last.request_id)
    finally:
        for engine in engines:
            engine._receiver._keeps = False
    assert bool(prefilled.outputs[0].kv_bytes) == (name == A)
    expected = pair.answer(prompt_tokens=second, adapter=name, cache_scope="alone")
    assert prefilled.token_ids == expected.token_ids[:1]


@pytest.mark.parametrize("orchestration", [Orchestration.DECODE_FIRST, Orchestration.CONCURRENT])
def test_pair_keeps_adapter(pair: Pair, orchestration: Orchestration) -> None:
    if orchestration not in pair.consumer.capability.orchestrations:
        pytest.skip("these engines do not push")
    for tokens in (40, 300):
        prompt = make_prompt(tokens, salt=307)
        local = pair.answer(prompt_tokens=prompt, adapter=B, cache_scope="y").token_ids
        scope = f"{orchestration} {B}"
        attempt = paired(
            pair.producer, pair.consumer, prompt, orchestration, adapter=B, cache_scope=scope
        )
        prefilled, decoded = pair.run(attempt)
        assert prefilled.token_ids == local[:1]
        assert decoded.token_ids == local
        assert decoded.outputs[0].kv_bytes, "it was written, not computed"


def test_answer_of_adapter_continues(pair: Pair) -> None:
    """As after the death of its worker."""
    prompt = make_prompt(40, salt=308)
    whole = pair.answer(prompt_tokens=prompt, adapter=A, max_tokens=40)
    jobs = [
        job([*prompt, *whole.token_ids[:count]], prior_tokens=count, adapter=A, max_tokens=40)
        for count in (1, 7, 24, 39)
    ]
    rests = pair.run(collected(pair.producer, *jobs))
    for count, rest in zip((1, 7, 24, 39), rests, strict=True):
        assert rest.token_ids == whole.token_ids[count:], count


def test_loaded_adapters_are_bounded(pair: Pair) -> None:
    """The least recently used one leaves."""
    for name in NAMES:
        pair.answer(adapter=name, max_tokens=1)
    assert {*pair.consumer.load().adapters} == {*NAMES[1:]}
    assert len(NAMES) == LOADED_MAX + 1


def test_adapter_that_is_gone_fails_only_its_requests(
    pair: Pair, folders: dict[str, Path], tmp_path: Path
) -> None:
    if not is_real(pair):
        pytest.skip("the simulated engine reads no adapter")
    for name in NAMES:
        pair.answer(adapter=name, max_tokens=1)
    shutil.move(folders[NAMES[0]], tmp_path / "away")
    answer = pair.answer(adapter=NAMES[0])
    assert answer.error_code == EngineFailed.code
    os.rename(tmp_path / "away", folders[NAMES[0]])
    assert pair.answer(adapter=NAMES[1]).last.finish_reason == "length"
    assert pair.answer(adapter=NAMES[0]).last.finish_reason == "length"
