"""What every engine must do, run on every engine; sizes and times differ and are not compared."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import EngineDead
from schemas.records import Orchestration
from tests.waits import until
from tests.workers.llm.engine_pair import Pair
from tests.workers.llm.engines import (
    DECODE,
    ENGINES,
    PREFILL,
    Answer,
    allocated,
    answered,
    collected,
    end_id,
    handed_over,
    job,
    paired,
    paired_jobs,
)
from tests.workers.llm.engines import prompt as make_prompt

MOMENT_S = 0.01  # in which nothing can come


def test_capabilities_of_paired_engines_match(pair: Pair) -> None:
    producer, consumer = pair.producer.capability, pair.consumer.capability
    assert producer.engine_id != consumer.engine_id
    assert producer.kv_layout == consumer.kv_layout
    assert producer.block_size > 0
    assert producer.running_max > 1


def test_answer_has_requested_length_and_text(pair: Pair) -> None:
    answer = pair.answer(max_tokens=12)
    assert answer.last.finish_reason == "length"
    assert len(answer.token_ids) == 12
    assert answer.text
    assert [output.finish_reason for output in answer.outputs[:-1]] == [""] * (
        len(answer.outputs) - 1
    )


def test_greedy_answers_repeat(pair: Pair) -> None:
    assert pair.answer().token_ids == pair.answer().token_ids


def test_answer_depends_on_prompt(pair: Pair) -> None:
    other_prompt = [*make_prompt(39), 99]
    assert pair.answer().token_ids != pair.answer(prompt_tokens=other_prompt).token_ids


@pytest.mark.parametrize("prior_tokens", [1, 8, 15])
def test_engine_continues_answer_after_prior_tokens(pair: Pair, prior_tokens: int) -> None:
    whole = pair.answer(max_tokens=16, min_tokens=12)
    behind = [*make_prompt(40), *whole.token_ids[:prior_tokens]]
    rest = pair.answer(
        prompt_tokens=behind, prior_tokens=prior_tokens, max_tokens=16, min_tokens=12
    )
    assert rest.token_ids == whole.token_ids[prior_tokens:]
    assert whole.text.endswith(rest.text) and rest.text
    assert rest.last.finish_reason == "length"


def test_engine_ends_answer_whose_prior_tokens_hold_its_end(pair: Pair) -> None:
    """An earlier attempt sampled the end and could not report it."""
    end = end_id(pair.consumer)
    behind: dict[str, Any] = {"prompt_tokens": [*make_prompt(40), 5, end], "prior_tokens": 2}
    for phase in (PREFILL, DECODE):
        answer = pair.answer(**behind, phase=phase, ignore_eos=False)
        assert (answer.token_ids, answer.last.finish_reason) == ([], "stop")
    answer = pair.answer(**behind, stop_token_ids=(end,))
    assert (answer.token_ids, answer.last.stop_reason) == ([], str(end))
    assert len(pair.answer(**behind).token_ids) == 10


def test_sampling_repeats_with_prior_tokens_and_seed(pair: Pair) -> None:
    def rest() -> list[int]:
        behind = [*make_prompt(40), 5, 6]
        tokens = pair.answer(
            prompt_tokens=behind, prior_tokens=2, max_tokens=9, temperature=1.0, seed=3
        )
        return tokens.token_ids

    assert rest() == rest() and len(rest()) == 7


def test_hand_over_keeps_answer_with_prior_tokens(pair: Pair) -> None:
    whole = pair.answer(max_tokens=16)
    behind = [*make_prompt(40), *whole.token_ids[:6]]
    prefilled, decoded = pair.run(
        handed_over(pair.producer, pair.consumer, behind, prior_tokens=6, max_tokens=16)
    )
    assert prefilled.token_ids == whole.token_ids[6:7]
    assert decoded.token_ids == whole.token_ids[6:]


def test_sampling_repeats_by_seed(pair: Pair) -> None:
    def sample(seed: int) -> list[int]:
        return pair.answer(temperature=1.0, seed=seed).token_ids

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)


def test_batch_neighbours_do_not_change_answer(pair: Pair) -> None:
    jobs = [job(make_prompt(20 + 9 * i, i), max_tokens=8 + i) for i in range(6)]
    together = pair.run(collected(pair.consumer, *jobs))
    for neighbour_job, answer in zip(jobs, together, strict=True):
        alone = pair.run(
            answered(
                pair.consumer,
                replace(neighbour_job, request_id=f"{neighbour_job.request_id}-again"),
            )
        )
        assert alone.token_ids == answer.token_ids
        assert alone.text == answer.text


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_string_ends_answer(pair: Pair, include_stop: bool) -> None:
    whole = pair.answer(max_tokens=24).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    answer = pair.answer(max_tokens=24, stop=(stop,), include_stop=include_stop)
    end = whole.index(stop) + (len(stop) if include_stop else 0)
    assert answer.text == whole[:end]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)


def test_unmatched_stop_string_loses_no_text(pair: Pair) -> None:
    whole = pair.answer(max_tokens=24).text
    answer = pair.answer(max_tokens=24, stop=(whole[-1] + "#", whole[-3:] + "#"))
    assert answer.text == whole
    assert answer.last.finish_reason == "length"


def test_stop_token_ends_answer(pair: Pair) -> None:
    whole = pair.answer().token_ids
    answer = pair.answer(stop_token_ids=(whole[5],))
    assert answer.token_ids == whole[: whole.index(whole[5]) + 1]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", str(whole[5]))


def test_min_tokens_delay_stop_token(pair: Pair) -> None:
    first = pair.answer().token_ids[0]
    answer = pair.answer(stop_token_ids=(first,), min_tokens=6)
    assert len(answer.token_ids) >= 6


def test_answer_has_logprobs_on_request(pair: Pair) -> None:
    answer = pair.answer(logprobs=3)
    logprobs = [entry for output in answer.outputs for entry in output.logprobs]
    assert [entry.token_id for entry in logprobs] == answer.token_ids
    for entry in logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) >= 3
        assert len({top.token_id for top in entry.top}) == len(entry.top)
        assert sum(math.exp(top.logprob) for top in entry.top) <= 1 + 1e-4
    assert not any(output.logprobs for output in pair.answer().outputs)


def test_abort_ends_answer(pair: Pair) -> None:
    async def main() -> Answer:
        long_job = job(make_prompt(30), max_tokens=1_500)
        pair.consumer.add(long_job)
        while not any(out.token_ids for out in await pair.consumer.outputs()):
            pass
        pair.consumer.abort(long_job.request_id)
        pair.consumer.abort("nobody")
        answer = (await collected(pair.consumer, long_job, add=False))[0]
        await until(lambda: not pair.consumer.load().running)
        return answer

    assert pair.run(main()).last.finish_reason == "abort"


def test_load_counts_tokens_and_blocks(pair: Pair) -> None:
    before = pair.consumer.load().tokens_total
    pair.answer(max_tokens=7)

    async def idle() -> None:
        await until(lambda: not pair.consumer.load().running)

    pair.run(idle())
    load = pair.consumer.load()
    assert load.tokens_total - before >= 6
    assert load.kv_blocks_total > 0
    assert 0 <= load.kv_blocks_used <= load.kv_blocks_total


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 70, 200])
def test_hand_over_keeps_answer(pair: Pair, tokens: int) -> None:
    samplings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 7})
    for sampling in samplings:
        prompt = make_prompt(tokens, salt=tokens)
        prefilled, decoded = pair.run(
            handed_over(pair.producer, pair.consumer, prompt, max_tokens=20, **sampling)
        )
        alone = pair.run(answered(pair.producer, job(prompt, max_tokens=20, **sampling)))
        assert prefilled.token_ids == alone.token_ids[:1]
        assert decoded.token_ids == alone.token_ids
        assert decoded.text == alone.text
        assert decoded.last.finish_reason == "length"


def test_handle_describes_kv(pair: Pair) -> None:
    prompt = make_prompt(50, salt=91)
    prefilled, decoded = pair.run(handed_over(pair.producer, pair.consumer, prompt))
    kv = prefilled.last.kv
    assert kv is not None
    assert len(prefilled.token_ids) == 1
    assert kv.engine_id == pair.producer.capability.engine_id
    assert kv.tokens == 50
    assert len(kv.params) < 2_000
    assert sum(output.kv_bytes > 0 for output in decoded.outputs) == 1
    assert decoded.outputs[0].kv_bytes > 0
    assert pair.consumer.load().kv_bytes_received > 0


def test_hand_over_reads_only_missing_blocks(pair: Pair) -> None:
    first = make_prompt(300, salt=92)
    _, decoded = pair.run(handed_over(pair.producer, pair.consumer, first))
    second = [*first, *decoded.token_ids, *make_prompt(20, salt=93)]
    _, next_decoded = pair.run(handed_over(pair.producer, pair.consumer, second))
    assert 0 < next_decoded.outputs[0].kv_bytes < decoded.outputs[0].kv_bytes


def test_engine_caches_prefix_for_next_turn(pair: Pair) -> None:
    first = make_prompt(300, salt=94)
    answer = pair.answer(prompt_tokens=first)
    next_answer = pair.answer(prompt_tokens=[*first, *answer.token_ids, *make_prompt(20, salt=95)])
    assert next_answer.outputs[0].cached_tokens >= 256


def test_prefix_cache_separates_scopes(pair: Pair) -> None:
    """Otherwise a tenant could detect another's prompt by `cached_tokens`."""
    guess = make_prompt(300, salt=96)
    cached_tokens = {
        number: pair.answer(prompt_tokens=guess, cache_scope=scope).outputs[0].cached_tokens
        for number, scope in enumerate(("ada", "bob", "", "ada", "bob"))
    }
    assert [cached_tokens[number] for number in range(3)] == [0, 0, 0]
    assert cached_tokens[3] >= 256 and cached_tokens[4] >= 256


def test_prefill_of_whole_answer_leaves_no_handle(pair: Pair) -> None:
    answer = pair.run(answered(pair.producer, job(make_prompt(20), PREFILL, max_tokens=1)))
    assert answer.last.finish_reason == "length"
    assert answer.last.kv is None
    assert len(answer.token_ids) == 1


@pytest.mark.parametrize("case", ["used", "expired", "malformed"])
def test_engine_rejects_unusable_handle(pair: Pair, case: str) -> None:
    """An engine reports a retriable error or computes the prompt itself."""
    prompt = make_prompt(60, salt=96)

    async def main() -> Answer:
        prefilled, _ = await handed_over(pair.producer, pair.consumer, prompt)
        kv = prefilled.last.kv
        assert kv is not None
        fresh = job(prompt, PREFILL)
        if case != "used":
            kv = (await answered(pair.producer, fresh)).last.kv
            assert kv is not None
        if case == "expired":
            kv = replace(kv, expires_at_ms=1)
        if case == "malformed":
            kv = replace(kv, tokens=kv.tokens + 1)
        answer = await answered(pair.consumer, job(prompt, kv=kv))
        pair.producer.abort(fresh.request_id)  # else its lease holds the memory for long
        return answer

    answer = pair.run(main())
    assert not any(output.kv_bytes for output in answer.outputs)
    if answer.last.error is None:
        assert answer.token_ids == pair.answer(prompt_tokens=prompt).token_ids
    else:
        assert answer.last.finish_reason == "error"
        assert answer.error_code == "kv_unavailable"
        assert answer.last.error.retriable
    assert pair.answer().last.finish_reason == "length"  # the engine goes on


@pytest.fixture(params=[Orchestration.CONCURRENT, Orchestration.DECODE_FIRST])
def together(request: pytest.FixtureRequest, pair: Pair) -> Orchestration:
    """A paired orchestration that both engines can do."""
    orchestration: Orchestration = request.param
    for engine in (pair.producer, pair.consumer):
        if orchestration not in engine.capability.orchestrations:
            pytest.skip(f"the engine {engine.capability.engine} cannot do {orchestration}")
    return orchestration


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 70, 200])
def test_paired_phases_keep_answer(pair: Pair, together: Orchestration, tokens: int) -> None:
    samplings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 7})
    for sampling in samplings:
        salt = 200 + tokens + len(sampling) + 1_000 * len(together.value)
        prompt, fields = make_prompt(tokens, salt), {"max_tokens": 20, **sampling}
        prefilled, decoded = pair.run(
            paired(pair.producer, pair.consumer, prompt, together, **fields)
        )
        alone = pair.run(answered(pair.producer, job(prompt, **fields)))
        assert prefilled.token_ids == alone.token_ids[:1]
        assert decoded.token_ids == alone.token_ids
        assert decoded.text == alone.text
        assert decoded.last.finish_reason == "length"
        assert (prefilled.last.finish_reason, prefilled.last.kv) == ("handover", None)
        assert not any(output.finish_reason for output in prefilled.outputs[:-1])


def test_paired_prefill_writes_only_missing_blocks(pair: Pair, together: Orchestration) -> None:
    first = make_prompt(300, salt=300 + len(together.value))
    prefilled, decoded = pair.run(paired(pair.producer, pair.consumer, first, together))
    second = [*first, *decoded.token_ids, *make_prompt(20, salt=301)]
    next_prefilled, next_decoded = pair.run(paired(pair.producer, pair.consumer, second, together))
    assert 0 < next_prefilled.last.kv_bytes < prefilled.last.kv_bytes
    assert next_decoded.outputs[0].kv_bytes < decoded.outputs[0].kv_bytes
    alone = pair.run(answered(pair.producer, job(second)))
    assert next_decoded.token_ids == alone.token_ids


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_abort_ends_both_phases_in_either_order(
    pair: Pair, together: Orchestration, phase: str
) -> None:
    prompt = make_prompt(60, salt=310 + len(together.value) + len(phase))

    async def main() -> tuple[str, str]:
        first, second = paired_jobs(pair.producer, pair.consumer, prompt, together)
        if together is Orchestration.DECODE_FIRST:
            target = (await allocated(pair.consumer, second)).kv
            first = replace(first, kv_target=target)
        else:
            pair.consumer.add(second)
        pair.producer.add(first)
        sides = [(pair.producer, first), (pair.consumer, second)]
        for engine, side_job in sides if phase == "prefill" else reversed(sides):
            engine.abort(side_job.request_id)
        ends = await asyncio.gather(*(collected(engine, job, add=False) for engine, job in sides))
        for engine, _ in sides:
            await until(lambda engine=engine: not engine.load().running)
        return ends[0][0].last.finish_reason, ends[1][0].last.finish_reason

    assert pair.run(main()) == ("abort", "abort")
    assert pair.answer().last.finish_reason == "length"


def test_engine_ignores_repeated_jobs_of_pair(pair: Pair, together: Orchestration) -> None:
    prompt = make_prompt(60, salt=320 + len(together.value))

    async def main() -> tuple[Answer, Answer]:
        first, second = paired_jobs(pair.producer, pair.consumer, prompt, together)
        if together is Orchestration.DECODE_FIRST:
            target = (await allocated(pair.consumer, second)).kv
            first = replace(first, kv_target=target)
        for _ in range(2):
            pair.producer.add(first)
            pair.consumer.add(second)
        (prefilled,), (decoded,) = await asyncio.gather(
            collected(pair.producer, first, add=False), collected(pair.consumer, second, add=False)
        )
        return prefilled, decoded

    prefilled, decoded = pair.run(main())
    assert len(prefilled.token_ids) == 1
    assert decoded.token_ids == pair.answer(prompt_tokens=prompt).token_ids


def test_engines_run_pairs_concurrently(pair: Pair, together: Orchestration) -> None:
    """Pairs run in both directions at the same time."""

    async def main() -> None:
        engines = (pair.producer, pair.consumer)
        prompts = [make_prompt(30 + 7 * i, salt=330 + i) for i in range(6)]
        jobs = [
            paired_jobs(engines[i % 2], engines[(i + 1) % 2], tokens, together, max_tokens=8 + i)
            for i, tokens in enumerate(prompts)
        ]
        answers: dict[tuple[int, str], Answer] = {}

        async def serve(at: int) -> None:
            engine, open_ids = engines[at], {prefill_job.request_id for prefill_job, _ in jobs}
            while open_ids:
                for output in await engine.outputs():
                    key = at, output.request_id
                    answers.setdefault(key, Answer()).outputs.append(output)
                    if output.kv is not None:
                        i = next(
                            i for i, job_pair in enumerate(jobs) if job_pair[0].request_id == key[1]
                        )
                        engines[i % 2].add(replace(jobs[i][0], kv_target=output.kv))
                    if output.finish_reason:
                        open_ids.discard(output.request_id)

        for i, (first, second) in enumerate(jobs):
            engines[(i + 1) % 2].add(second)
            if together is Orchestration.CONCURRENT:
                engines[i % 2].add(first)
        await asyncio.gather(serve(0), serve(1))
        for i, (first, _) in enumerate(jobs):
            alone = await answered(engines[0], job(prompts[i], max_tokens=8 + i))
            assert answers[i % 2, first.request_id].token_ids == alone.token_ids[:1]
            assert answers[(i + 1) % 2, first.request_id].token_ids == alone.token_ids

    pair.run(main())


def test_engine_rejects_empty_or_oversized_prompt(pair: Pair) -> None:
    longest = pair.consumer.capability.max_model_len
    assert pair.answer(prompt_tokens=[5] * (longest + 1)).error_code == "context_length_exceeded"
    assert pair.answer(prompt_tokens=[]).error_code == "invalid_request"


def test_deadline_ends_request(pair: Pair) -> None:
    answer = pair.answer(max_tokens=1_900, timeout_ms=50)
    assert answer.last.finish_reason == "error"
    assert answer.error_code == "deadline_exceeded"


def test_cancelled_wait_loses_no_output(pair: Pair) -> None:
    async def main() -> Answer:
        waiting = asyncio.ensure_future(pair.consumer.outputs())
        await asyncio.wait([waiting], timeout=MOMENT_S)
        waiting.cancel()
        await asyncio.wait([waiting])
        return await answered(pair.consumer, job(make_prompt(20)))

    assert len(pair.run(main()).token_ids) == 12


def test_close_ends_engine(request: pytest.FixtureRequest, pair: Pair) -> None:
    name = request.node.callspec.params["pair"]
    if name.startswith("vllm"):
        pytest.skip("a third vLLM engine takes a minute to start")

    async def main() -> None:
        engine = await ENGINES[name]()
        engine.add(job(make_prompt(20), max_tokens=1_000))
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDead, match="closed"):
            while True:
                await engine.outputs()

    pair.run(main())
