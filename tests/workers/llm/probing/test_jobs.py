"""Answers that search meanwhile, run on every engine."""

from typing import Any

import pytest

from schemas.records import Insert
from schemas.rules.tokens import pack_tokens, unpack_tokens
from tests.waits import until
from tests.workers.llm.engine_pair import Pair
from tests.workers.llm.engines import PREFILL, answered, job
from tests.workers.llm.engines import prompt as make_prompt
from tests.workers.llm.probing.engine_probing import Searched, searched
from tests.workers.llm.probing.probes import passage, probes
from workers.llm.engine import Output

FOUND = [passage(f"p{number}", *range(50 + number, 70 + number)) for number in range(3)]
WISHES: dict[str, Any] = {
    **{"every": 8, "lookahead": 3, "probes_max": 3, "tokens_max": 200, "stall_ms": 10_000},
    **{name: pack_tokens([token]) for name, token in (("lead", 41), ("joint", 42), ("trail", 43))},
}


def with_passages(pair: Pair, prompt: list[int], answer: Searched, max_tokens: int) -> list[int]:
    """The answer as it is where each part is generated alone, from all that is before it."""
    token_ids: list[int] = []
    for record in [*answer.records, None]:
        until_seq = max_tokens if record is None else record.seq
        part = job(prompt, max_tokens=until_seq - len(token_ids))
        ids = pair.run(answered(pair.producer, part)).token_ids
        token_ids += ids
        prompt = [*prompt, *ids, *unpack_tokens(b"" if record is None else record.tokens)]
    return token_ids


@pytest.mark.parametrize("is_remote", [False, True])
def test_answer_continues_with_retrieved_passages(pair: Pair, is_remote: bool) -> None:
    """The engine computes inserted passages only, whether its KV is local or fetched."""
    prompt = make_prompt(300, salt=400 + is_remote)

    async def main() -> Searched:
        request_id = f"searching-{is_remote}"
        kv = None
        if is_remote:
            first = job(prompt, PREFILL, request_id=f"{request_id}.1", max_tokens=40)
            kv = (await answered(pair.producer, first)).last.kv
            assert kv is not None
        probing_job = job(prompt, request_id=request_id, kv=kv, max_tokens=40)
        return await searched(
            pair.consumer, probing_job, probes(**WISHES), lambda ask: [FOUND[ask.probe - 1]]
        )

    answer: Searched = pair.run(main())
    assert [record.probe for record in answer.records] == [1, 2, 3]
    assert answer.token_ids == with_passages(pair, prompt, answer, 40)
    assert answer.last is not None and answer.last.finish_reason == "length"
    assert any(output.kv_bytes for output in answer.raw) == is_remote
    later: dict[str, int] = {}  # what each further job found in the engine's cache
    for output in answer.raw:
        later.setdefault(output.request_id, output.cached_tokens)
    assert [job_id.partition("+")[2] for job_id in later] == ["", "2", "3", "4"]
    assert all(cached >= 256 for job_id, cached in later.items() if "+" in job_id)


def test_later_attempt_reproduces_answer(pair: Pair) -> None:
    """Another engine repeats the answer without repeating decided probes."""
    prompt = make_prompt(60, salt=410)

    def finds(ask: Any) -> Any:
        return [FOUND[ask.probe - 1]] if ask.probe != 2 else []

    async def first() -> Searched:
        probing_job = job(prompt, max_tokens=40)
        return await searched(pair.consumer, probing_job, probes(**WISHES), finds)

    async def second(original: Searched) -> Searched:
        inserts = [Insert(at=record.seq, tokens=record.tokens) for record in original.records[:2]]
        wishes = probes(inserts, 2, known_passages=["p0#0"], **WISHES)
        return await searched(pair.producer, job(prompt, max_tokens=40), wishes, finds)

    original = pair.run(first())
    repeat = pair.run(second(original))
    assert [record.probe for record in repeat.records] == [3]
    assert (repeat.token_ids, repeat.text) == (original.token_ids, original.text)
    assert repeat.records[0].tokens == original.records[2].tokens


def test_stop_string_ends_probing_answer_at_same_place(pair: Pair) -> None:
    prompt, nothing = make_prompt(40), {**WISHES, "probes_max": 0}
    text = pair.answer(max_tokens=24).text
    for stop in (text[5:8], text[-4:-1]):
        plain = pair.answer(max_tokens=24, stop=(stop,))
        probing_job = job(prompt, max_tokens=24, stop=(stop,))
        answer: Searched = pair.run(searched(pair.consumer, probing_job, probes(**nothing)))
        assert (answer.text, answer.token_ids) == (plain.text, plain.token_ids)
        assert answer.last is not None
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
    pair.run(until_idle(pair))


def test_engine_texts_split_merged_output_by_token(pair: Pair) -> None:
    """An engine may merge several tokens into one output."""
    outputs = pair.answer(max_tokens=24).outputs
    if any(len(output.token_ids) != 1 for output in outputs):
        pytest.skip("the engine was not heard for a while")
    ids, texts = [output.token_ids[0] for output in outputs], [output.text for output in outputs]
    merged = Output(request_id="r", token_ids=ids[4:], text="".join(texts[4:]))
    assert list(pair.consumer.texts(ids[:4], merged)) == texts[4:]


async def until_idle(pair: Pair) -> None:
    """An answer that was stopped from here has left the engine."""
    await until(lambda: not pair.consumer.load().running)
