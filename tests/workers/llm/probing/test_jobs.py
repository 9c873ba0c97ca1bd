"""Answers that search meanwhile, run on every engine."""

from typing import Any

import pytest

from schemas.records import Insert
from schemas.rules.tokens import pack_tokens, unpack_tokens
from tests.waiting import until
from tests.workers.llm.engine_pair import Pair
from tests.workers.llm.engines import PREFILL, answered, job
from tests.workers.llm.engines import prompt as make_prompt
from tests.workers.llm.probing.on_engine import Searched, searched
from tests.workers.llm.probing.probes import passage, probes
from workers.llm.engine import Output

FOUND = [passage(f"p{number}", *range(50 + number, 70 + number)) for number in range(3)]
WISHES: dict[str, Any] = {
    **{"every": 8, "lookahead": 3, "probes_max": 3, "tokens_max": 200, "stall_ms": 10_000},
    **{name: pack_tokens([token]) for name, token in (("lead", 41), ("joint", 42), ("trail", 43))},
}


def with_passages(pair: Pair, prompt: list[int], answer: Searched, max_tokens: int) -> list[int]:
    """The answer as it is where each part is generated alone, from all that is before it."""
    said: list[int] = []
    for record in [*answer.records, None]:
        until_seq = max_tokens if record is None else record.seq
        part = job(prompt, max_tokens=until_seq - len(said))
        ids = pair.run(answered(pair.producer, part)).token_ids
        said += ids
        prompt = [*prompt, *ids, *unpack_tokens(b"" if record is None else record.tokens)]
    return said


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_answer_goes_on_with_what_its_searches_found(pair: Pair, is_remote: bool) -> None:
    """Whether its KV was computed here or fetched; only what was put in is computed."""
    prompt = make_prompt(300, salt=400 + is_remote)

    async def main() -> Searched:
        request_id = f"searching-{is_remote}"
        kv = None
        if is_remote:
            first = job(prompt, PREFILL, request_id=f"{request_id}.1", max_tokens=40)
            kv = (await answered(pair.producer, first)).last.kv
            assert kv is not None
        one = job(prompt, request_id=request_id, kv=kv, max_tokens=40)
        return await searched(
            pair.consumer, one, probes(**WISHES), lambda ask: [FOUND[ask.probe - 1]]
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


def test_a_later_attempt_makes_the_same_answer_again(pair: Pair) -> None:
    """Without asking for what is decided, on another engine."""
    prompt = make_prompt(60, salt=410)

    def finds(ask: Any) -> Any:
        return [FOUND[ask.probe - 1]] if ask.probe != 2 else []

    async def first() -> Searched:
        one = job(prompt, max_tokens=40)
        return await searched(pair.consumer, one, probes(**WISHES), finds)

    async def again(lived: Searched) -> Searched:
        put_in = [Insert(at=each.seq, tokens=each.tokens) for each in lived.records[:2]]
        wishes = probes(put_in, 2, known=["p0#0"], **WISHES)
        return await searched(pair.producer, job(prompt, max_tokens=40), wishes, finds)

    lived = pair.run(first())
    repeated = pair.run(again(lived))
    assert [record.probe for record in repeated.records] == [3]
    assert (repeated.token_ids, repeated.text) == (lived.token_ids, lived.text)
    assert repeated.records[0].tokens == lived.records[2].tokens


def test_stop_strings_end_an_answer_that_searches_where_they_end_any_other(pair: Pair) -> None:
    prompt, nothing = make_prompt(40), {**WISHES, "probes_max": 0}
    text = pair.answer(max_tokens=24).text
    for stop in (text[5:8], text[-4:-1]):
        plain = pair.answer(max_tokens=24, stop=(stop,))
        one = job(prompt, max_tokens=24, stop=(stop,))
        answer: Searched = pair.run(searched(pair.consumer, one, probes(**nothing)))
        assert (answer.text, answer.token_ids) == (plain.text, plain.token_ids)
        assert answer.last is not None
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
    pair.run(until_idle(pair))


def test_the_text_of_each_token_is_that_of_its_own_output(pair: Pair) -> None:
    """However many an engine says at once."""
    outputs = pair.answer(max_tokens=24).outputs
    if any(len(output.token_ids) != 1 for output in outputs):
        pytest.skip("the engine was not heard for a while")
    ids, said = [output.token_ids[0] for output in outputs], [output.text for output in outputs]
    merged = Output(request_id="r", token_ids=ids[4:], text="".join(said[4:]))
    assert list(pair.consumer.texts(ids[:4], merged)) == said[4:]


async def until_idle(pair: Pair) -> None:
    """An answer that was stopped from here has left the engine."""
    await until(lambda: not pair.consumer.load().running)
