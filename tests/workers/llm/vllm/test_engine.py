"""The vLLM engine beyond the contract: hand-overs that go wrong, figures, and engines that die.

One prefill and one decode engine for all tests, the ones of the contract; the last tests end them.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest

from schemas.errors import EngineDead
from schemas.prefix import chain
from schemas.records import KvHandle, Orchestration, Structured, StructuredKind
from streams.log.clock import wall_ms
from tests.waits import until
from tests.workers.llm.engine_pair import EnginePair, VllmPair
from tests.workers.llm.engines import (
    PREFILL,
    Answer,
    answered,
    collected,
    handed_over,
    job,
    prompt,
)
from tests.workers.processes import cores_used, family, lives
from workers.llm.vllm import engine as vllm_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]  # two engines start
BLOCK_BYTES = 32 * 2 * 4 * 4 * 32 * 4  # tokens, K and V, layers, heads, size, float32


@dataclass
class Engines(EnginePair):
    """The two engines and their processes."""

    producer_pid: int
    consumer_pid: int

    def alone(self, tokens: list[int], **sampling: Any) -> Answer:
        """What the consumer answers without a hand-over."""
        answer: Answer = self.run(answered(self.consumer, job(tokens, **sampling)))
        return answer

    def extra(self, name: str) -> float:
        figure: float = self.consumer.load().extra[name]
        return figure


@pytest.fixture(scope="module")
def engines(pulling_pair: VllmPair) -> Iterator[Engines]:
    pair = pulling_pair.get()
    producer, consumer = pair.producer, pair.consumer
    yield Engines(pair.runner, producer, consumer, _core(producer), _core(consumer))
    pulling_pair.close()


def _core(engine: Any) -> int:
    """vLLM's engine process, the parent of the compute process."""
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    return int(core.pid)


def handle(engines: Engines, tokens: list[int], **sampling: Any) -> KvHandle:
    """A fresh handle of the producer."""
    answer = engines.run(answered(engines.producer, job(tokens, PREFILL, **sampling)))
    assert answer.last.kv is not None, answer.last
    kv: KvHandle = answer.last.kv
    return kv


def test_hand_overs_in_both_directions_keep_answers(engines: Engines) -> None:
    """Plain requests on the same engines give the expected answers."""

    async def main() -> list[tuple[list[int], list[int]]]:
        prompts = [prompt(30 + 40 * i, salt=200 + i) for i in range(6)]
        p, d = engines.producer, engines.consumer
        pairs = [handed_over(*((p, d) if i % 2 else (d, p)), t) for i, t in enumerate(prompts)]
        over = [await pair for pair in pairs]
        alone = await collected(p, *[job(t) for t in prompts])
        answers = zip(over, alone, strict=True)
        return [(pair[1].token_ids, answer.token_ids) for pair, answer in answers]

    for over, alone in engines.run(main()):
        assert over == alone


def test_hand_over_counts_bytes_and_own_cached_tokens(engines: Engines) -> None:
    tokens = prompt(300, salt=210)
    before = engines.consumer.load().kv_bytes_received
    _, decoded = engines.run(handed_over(engines.producer, engines.consumer, tokens))
    first = decoded.outputs[0]
    assert first.kv_bytes == 10 * BLOCK_BYTES
    assert first.transfer_ms > 0
    assert first.cached_tokens == 0
    assert engines.consumer.load().kv_bytes_received - before == first.kv_bytes
    longer = [*tokens, *decoded.token_ids, *prompt(30, salt=211)]
    _, next_decoded = engines.run(handed_over(engines.producer, engines.consumer, longer))
    assert next_decoded.outputs[0].cached_tokens == 288
    assert next_decoded.outputs[0].kv_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    "bad",
    [
        {"remote_block_ids": None},
        {"remote_request_id": None},
        {"remote_host": 7},
        {"remote_block_ids": [[0, 1, 2]]},
        {"do_remote_prefill": False},
    ],
)
def test_malformed_handle_never_reaches_engine(engines: Engines, bad: dict[str, Any]) -> None:
    tokens = prompt(50, salt=212)
    kv = handle(engines, tokens)
    refused = engines.extra("kv_refused_total")
    params = {**json.loads(kv.params), **bad}
    broken = replace(kv, params=json.dumps(params).encode())
    answer = engines.run(answered(engines.consumer, job(tokens, kv=broken)))
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert engines.extra("kv_refused_total") == refused + 1
    engines.producer.abort(kv.engine_request_id[:-9])  # else its lease holds the memory for long


def _unknown(kv: KvHandle) -> KvHandle:
    params = json.dumps({**json.loads(kv.params), "remote_request_id": "nobody-00000000"})
    return replace(kv, engine_request_id="nobody-00000000", params=params.encode())


def _out_of_range(kv: KvHandle) -> KvHandle:
    far = [10**6 + number for number in range(len(kv.block_ids))]
    params = json.dumps({**json.loads(kv.params), "remote_block_ids": [far]})
    return replace(kv, block_ids=tuple(far), params=params.encode())


@pytest.mark.parametrize(
    ("salt", "change", "refused"),
    [
        (250, _unknown, 0),
        (251, _out_of_range, 0),
        (252, lambda kv: replace(kv, expires_at_ms=1), 1),
    ],
    ids=["unknown request", "blocks out of range", "lease ended"],
)
def test_dangling_kv_references_pass(
    engines: Engines, salt: int, change: Any, refused: int
) -> None:
    tokens = prompt(70, salt=salt)
    kv, before = handle(engines, tokens), engines.extra("kv_refused_total")
    answer = engines.run(answered(engines.consumer, job(tokens, kv=change(kv))))
    engines.producer.abort(kv.engine_request_id[:-9])
    alone = engines.run(answered(engines.producer, job(tokens)))
    assert answer.token_ids == alone.token_ids
    assert engines.alone(tokens).token_ids == alone.token_ids  # what is cached is right, too
    assert engines.extra("kv_refused_total") == before + refused


@pytest.mark.parametrize("is_consumed", [True, False])
def test_engine_does_not_read_kv_of_other_prompt(engines: Engines, is_consumed: bool) -> None:
    """vLLM without the check would give the former prompt's answer."""
    tokens, other_prompt = (prompt(70, salt=salt) for salt in ((253, 254), (255, 256))[is_consumed])
    kv, before = handle(engines, tokens), engines.extra("kv_refused_total")
    if is_consumed:
        engines.run(answered(engines.consumer, job(tokens, kv=kv)))
    answer = engines.run(answered(engines.consumer, job(other_prompt, kv=kv)))
    engines.producer.abort(kv.engine_request_id[:-9])
    assert answer.token_ids == engines.run(answered(engines.producer, job(other_prompt))).token_ids
    assert engines.extra("kv_refused_total") == before + 1


def test_engine_skips_read_after_handle_expiry(engines: Engines) -> None:
    """The adapter accepts the handle in time; vLLM starts the read too late."""
    tokens = prompt(70, salt=213)
    kv = handle(engines, tokens)
    now_ms = wall_ms()
    late = replace(kv, expires_at_ms=now_ms)
    with patch.object(vllm_engine, "wall_ms", lambda: now_ms - 1):
        answer = engines.run(answered(engines.consumer, job(tokens, kv=late)))
    engines.producer.abort(kv.engine_request_id[:-9])
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert not any(output.kv_bytes for output in answer.outputs)
    assert "its time was over" in str(answer.outputs[0].kv_missed)


@pytest.mark.parametrize("fails", [3, 4])
def test_engine_retries_failed_read(engines: Engines, fails: int) -> None:
    """After four tries the engine computes the prompt and reports why."""
    tokens = prompt(70, salt=260 + fails)
    kv = handle(engines, tokens)
    retried, recomputed = (engines.extra(f"kv_{name}_total") for name in ("retries", "recomputed"))
    engines.run(engines.consumer._llm.collective_rpc("fail_moves", args=(fails,)))
    answer = engines.run(answered(engines.consumer, job(tokens, kv=kv)))
    engines.producer.abort(kv.engine_request_id[:-9])
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert engines.extra("kv_retries_total") == retried + 3
    assert engines.extra("kv_recomputed_total") == recomputed + (fails > 3)
    assert (answer.outputs[0].kv_bytes > 0) == (fails == 3)
    why = str(answer.outputs[0].kv_missed)
    assert ("after 4 tries: " in why and "a test cut the connection" in why) == (fails > 3)


def test_stop_string_matches_across_hand_over(engines: Engines) -> None:
    tokens = prompt(40, salt=214)
    whole = engines.alone(tokens, max_tokens=16)
    first = engines.alone(tokens, max_tokens=1).text
    stop = whole.text[len(first) - 2 : len(first) + 3]
    prefilled, decoded = engines.run(
        handed_over(engines.producer, engines.consumer, tokens, max_tokens=16, stop=(stop,))
    )
    assert decoded.text == whole.text[: whole.text.index(stop)]
    assert decoded.text.startswith(prefilled.text)
    assert decoded.last.stop_reason == stop


def test_prefill_does_not_hand_over_answer_that_stops_at_once(engines: Engines) -> None:
    tokens = prompt(40, salt=215)
    first = engines.alone(tokens).token_ids[0]

    async def main() -> Answer:
        prefill_job = job(tokens, PREFILL, stop_token_ids=(first,))
        answer = await answered(engines.producer, prefill_job)
        await until(lambda: not engines.producer.load().kv_blocks_used)  # and holds no memory
        return answer

    answer: Answer = engines.run(main())
    assert (answer.last.finish_reason, answer.last.kv) == ("stop", None)


def test_abort_frees_abandoned_hand_over(engines: Engines) -> None:
    async def main() -> None:
        prefill_job = job(prompt(200, salt=216), PREFILL)
        assert (await answered(engines.producer, prefill_job)).last.kv is not None
        assert engines.producer.load().kv_handles_held >= 1
        assert engines.producer.load().kv_blocks_used > 0
        engines.producer.abort(prefill_job.request_id)
        await until(lambda: engines.producer.load().kv_handles_held == 0)
        assert engines.producer.load().kv_blocks_used == 0

    engines.run(main())


@pytest.mark.parametrize(
    ("kind", "value", "check"),
    [
        (StructuredKind.CHOICE, '["left", "right"]', lambda text: text in ("left", "right")),
        (StructuredKind.REGEX, "[0-9]{4}-[0-9]{2}", lambda text: text[:4].isdigit()),
        (
            StructuredKind.JSON_SCHEMA,
            '{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
            '"required": ["ok"], "additionalProperties": false}',
            lambda text: text in ('{"ok":true}', '{"ok":false}'),  # compact: it always ends
        ),
    ],
)
def test_form_survives(engines: Engines, kind: StructuredKind, value: str, check: Any) -> None:
    sampling = {"structured": Structured(kind=kind, value=value), "max_tokens": 40}
    tokens = prompt(40, salt=217)
    prefilled, decoded = engines.run(
        handed_over(engines.producer, engines.consumer, tokens, **sampling, ignore_eos=False)
    )
    assert check(decoded.text)
    assert decoded.token_ids[:1] == prefilled.token_ids


def test_hand_over_keeps_logprobs(engines: Engines) -> None:
    tokens = prompt(40, salt=218)
    _, decoded = engines.run(handed_over(engines.producer, engines.consumer, tokens, logprobs=2))
    alone = engines.alone(tokens, logprobs=2)
    entries, expected = (
        [entry for output in answer.outputs for entry in output.logprobs]
        for answer in (decoded, alone)
    )
    assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
    for entry, expected_entry in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(expected_entry.logprob, abs=1e-3)
        assert [top.token_id for top in entry.top] == [top.token_id for top in expected_entry.top]
        assert len(entry.top) == 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 3.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -7},
        {"min_p": 2.0},
        {"presence_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"logprobs": 10_000},
        {"stop": ("",)},
        {"stop_token_ids": (99_999,), "min_tokens": 2},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {"99999": 1.0}},
        {"bad_words": ("",)},
        {"structured": Structured(kind=StructuredKind.REGEX, value="(")},
        {"structured": Structured(kind=StructuredKind.JSON_SCHEMA, value="{")},
        {"structured": Structured(kind=StructuredKind.CHOICE, value="7")},
        {"structured": Structured(kind=StructuredKind.GRAMMAR, value="root ::= (")},
    ],
)
def test_engine_rejects_invalid_sampling(engines: Engines, sampling: dict[str, Any]) -> None:
    bad_job = replace(job([5, 6, 7]), sampling=replace(job([5]).sampling, **sampling))
    answer = engines.run(answered(engines.consumer, bad_job))
    assert (answer.last.finish_reason, answer.error_code) == ("error", "invalid_request")
    assert engines.alone([5, 6, 7]).last.finish_reason == "length"


def test_engine_applies_logit_bias(engines: Engines) -> None:
    tokens = prompt(30, salt=219)
    plain = engines.alone(tokens).token_ids
    biased = engines.alone(tokens, logit_bias={str(plain[0]): -100.0}).token_ids
    assert biased[0] != plain[0]
    assert engines.alone(tokens, logit_bias={"1": 100.0}, ignore_eos=False).token_ids == [1]


@pytest.fixture
def keeping(engines: Engines) -> Iterator[Engines]:
    """Decoded KV is kept for the next turn; nothing is cached or kept before or after."""
    pair = (engines.producer, engines.consumer)
    engines.run(_emptied(*pair))
    for engine in pair:
        engine._receiver._keeps = True
    yield engines
    for engine in pair:
        engine._receiver._keeps = False


async def _emptied(*pair: Any) -> None:
    for engine in pair:
        await until(engine._llm.reset_prefix_cache)
        await answered(engine, job([5], PREFILL, max_tokens=1))  # events leave with a step
        await until(lambda: not len(engine.block_log))  # noqa: B023  # called in this round


def test_second_turn_reads_history_from_decode(keeping: Engines) -> None:
    p, d = keeping.producer, keeping.consumer
    first = prompt(400, salt=230)
    _, decoded = keeping.run(handed_over(p, d, first, max_tokens=26))
    history_kv = decoded.last.kv
    assert history_kv is not None
    assert history_kv.tokens == 425  # the last token's KV is not computed
    second = [*first, *decoded.token_ids, *prompt(90, salt=231)]
    keeping.run(_emptied(p))
    prefill_job = replace(job(second, PREFILL), kv=history_kv)
    prefilled = keeping.run(answered(p, prefill_job))
    assert prefilled.outputs[0].kv_bytes == 14 * BLOCK_BYTES
    assert prefilled.outputs[0].cached_tokens == 425  # those that it has read
    decode_job = job(second, request_id=prefill_job.request_id, kv=prefilled.last.kv)
    answer = keeping.run(answered(d, decode_job))
    d.abort(decode_job.request_id)  # gives its KV up
    keeping.run(_emptied(p, d))  # the first turn's was given up when it was read
    assert answer.token_ids == keeping.alone(second).token_ids
    refused = p.load().extra["kv_refused_total"]
    repeat_answer = keeping.run(answered(p, replace(job(second, PREFILL), kv=history_kv)))
    assert repeat_answer.token_ids == answer.token_ids[:1]
    assert p.load().extra["kv_refused_total"] == refused + 1
    p.abort(repeat_answer.last.request_id)


@pytest.mark.parametrize("case", ["expired", "other tokens", "too many", "malformed"])
def test_prefill_does_not_read_unusable_history(keeping: Engines, case: str) -> None:
    p, d = keeping.producer, keeping.consumer
    first = prompt(100, salt=232)
    _, decoded = keeping.run(handed_over(p, d, first, max_tokens=20))
    history_kv = decoded.last.kv
    assert history_kv is not None
    second = [*first, *decoded.token_ids, *prompt(30, salt=233)]
    if case == "expired":
        history_kv = replace(history_kv, expires_at_ms=1)
    elif case == "other tokens":
        second[40] += 1
    elif case == "too many":
        second = second[: history_kv.tokens]
    else:
        history_kv = replace(history_kv, params=history_kv.params.replace(b"expiry", b"e"))
    refused = p.load().extra["kv_refused_total"]
    prefilled = keeping.run(answered(p, replace(job(second, PREFILL), kv=history_kv)))
    assert not any(output.kv_bytes for output in prefilled.outputs)
    assert p.load().extra["kv_refused_total"] == refused + 1
    d.abort(decoded.last.request_id)
    p.abort(prefilled.last.request_id)
    assert keeping.alone(second).token_ids[:1] == prefilled.token_ids


def test_block_log_holds_cached_blocks(engines: Engines) -> None:
    p, d = engines.producer, engines.consumer
    tokens = prompt(100, salt=234)
    engines.run(_emptied(d))
    answer = engines.alone(tokens, max_tokens=40)
    computed = [*tokens, *answer.token_ids][:-1]
    expected = {*chain(computed, 32).tolist()}
    assert len(expected) == 4
    engines.run(until(lambda: {*d.block_log.snapshot()} == expected))
    received = prompt(70, salt=235)
    engines.run(handed_over(p, d, received, max_tokens=2))
    expected |= {*chain(received, 32).tolist()}
    engines.run(until(lambda: {*d.block_log.snapshot()} == expected))


def test_block_log_drops_evicted_blocks(engines: Engines) -> None:
    d = engines.consumer
    first = {*chain(prompt(64, salt=236), 32).tolist()}
    engines.alone(prompt(64, salt=236))
    engines.run(until(lambda: first <= {*d.block_log.snapshot()}))
    for number in range(9):
        engines.alone(prompt(1_900, salt=237 + number), max_tokens=1)
    latest = {*chain(prompt(1_900, salt=245), 32).tolist()}
    engines.run(until(lambda: latest <= {*d.block_log.snapshot()}))
    assert not first & {*d.block_log.snapshot()}
    assert len(d.block_log) <= d.load().kv_blocks_total
    assert engines.alone(prompt(64, salt=236)).outputs[0].cached_tokens == 0


def test_pulling_engine_rejects_concurrent_job(engines: Engines) -> None:
    concurrent = replace(job(prompt(30), PREFILL), orchestration=Orchestration.CONCURRENT)
    answer = engines.run(answered(engines.producer, concurrent))
    assert answer.error_code == "kv_unavailable"


def test_idle_engines_use_little_cpu(engines: Engines) -> None:
    """The plugin's main promise: the two engines together take less than a fifth of a core."""
    pids = family(engines.producer_pid) + family(engines.consumer_pid)

    async def is_calm() -> bool:  # not while they settle after the last test
        return await asyncio.to_thread(cores_used, pids, 2) < 0.2

    engines.run(until(is_calm))


def test_decode_recomputes_prompt_of_dead_producer(engines: Engines) -> None:
    tokens = prompt(90, salt=220)
    recomputed = engines.extra("kv_recomputed_total")
    prefill_job = job(tokens, PREFILL, max_tokens=12)
    kv = engines.run(answered(engines.producer, prefill_job)).last.kv
    pids = family(engines.producer_pid)
    os.kill(engines.producer_pid, signal.SIGKILL)

    async def dead() -> None:
        with pytest.raises(EngineDead):
            await engines.producer.outputs()
        late = await _error_of(engines.producer, job(tokens))
        assert late == "engine_dead"
        await until(lambda: not any(map(lives, pids)))  # the compute process can be read until then

    engines.run(dead())
    answer = engines.run(
        answered(engines.consumer, job(tokens, request_id=prefill_job.request_id, kv=kv))
    )
    assert answer.last.finish_reason == "length"
    assert answer.outputs[0].kv_bytes == 0
    assert answer.outputs[0].kv_missed is not None
    assert engines.extra("kv_recomputed_total") == recomputed + 1
    assert answer.token_ids == engines.alone(tokens).token_ids


def test_frozen_engine_is_idle(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    pids, runs = family(engines.consumer_pid), engines.consumer._runs

    async def main() -> str:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as brief:
                brief.setattr(runs, "progress_timeout_s", 1.0)
                answer = await answered(engines.consumer, job(prompt(40, salt=221)))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        return answer.error_code

    assert engines.run(main()) == "no_progress"
    assert engines.alone(prompt(40, salt=222)).last.finish_reason == "length"


def test_killed_engine_raises_engine_dead(engines: Engines) -> None:
    async def main() -> None:
        engines.consumer.add(job(prompt(20), max_tokens=1_500))
        while not any(output.token_ids for output in await engines.consumer.outputs()):
            pass
        os.kill(family(engines.consumer_pid)[-1], signal.SIGKILL)  # its compute process
        with pytest.raises(EngineDead, match="processes are gone"):
            while True:
                await engines.consumer.outputs()

    engines.run(main())


async def _error_of(engine: Any, job: Any) -> str:
    """The code of the error that a dead engine answers a job with, before it raises again."""
    engine.add(job)
    outputs = await engine.outputs()
    return str(outputs[0].error.code)
