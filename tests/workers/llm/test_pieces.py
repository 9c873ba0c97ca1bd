"""Outputs of several tokens, taken apart."""

import random

from tokenizers.decoders import DecodeStream

from schemas.records import TokenLogprob
from tests.workers.fakes import handle
from workers.llm.engine import Output
from workers.llm.pieces import TextSteps, repeated_chars, split, texts_of
from workers.models.sim import make_tokenizer

WORDS = {1: b"It", 2: b" costs", 3: b" \xe2\x82", 4: b"\xac", 5: b"", 6: b"9"}


def decode(token_ids: list[int]) -> str:
    return b"".join(WORDS[token] for token in token_ids).decode(errors="replace")


def texts(before: list[int], ids: list[int], text: str) -> list[str]:
    return texts_of(decode, before, Output(request_id="r", token_ids=ids, text=text))


def test_token_gets_text_that_it_completes() -> None:
    assert texts([], [1, 2, 5, 6], "It costs9") == ["It", " costs", "", "9"]
    assert texts([1, 2], [3, 4, 6], " €9") == ["", " €", "9"]
    assert texts([1, 3], [4, 6], " €9") == [" €", "9"]
    assert texts([], [1, 2, 3], "It costs") == ["It", " costs", ""]


def test_text_steps_are_those_of_decode_stream() -> None:
    """For any tokens, also if they spell no characters."""
    tokenizer, draws = make_tokenizer(), random.Random(5)
    size = tokenizer.get_vocab_size()
    for _ in range(200):
        prompt = [draws.randrange(size) for _ in range(draws.randrange(1, 30))]
        stream, steps = (
            DecodeStream(prompt, skip_special_tokens=True),
            TextSteps(tokenizer.decode, prompt),
        )
        for _ in range(40):
            token = draws.randrange(3, 300) if draws.random() < 0.3 else draws.randrange(size)
            assert steps.step(token) == (stream.step(tokenizer, token) or "")


def test_unmatched_text_goes_to_last_token() -> None:
    assert texts([], [1, 2], "It co") == ["", "It co"]


def test_split_output_keeps_other_fields_once() -> None:
    logprobs = [TokenLogprob(token_id=token, token="t", logprob=-1.0) for token in (1, 2)]
    whole = Output(
        request_id="r",
        token_ids=[1, 2],
        text="It costs",
        logprobs=logprobs,
        finish_reason="stop",
        stop_reason="x",
        kv=handle(9),
        kv_bytes=7,
        transfer_ms=2.0,
    )
    first, last = split(whole, ["It", " costs"])
    assert (first.token_ids, first.text, first.logprobs) == ((1,), "It", logprobs[:1])
    assert (first.finish_reason, first.kv, first.kv_bytes, first.transfer_ms) == ("", None, 7, 2.0)
    assert (last.token_ids, last.text, last.logprobs) == ((2,), " costs", logprobs[1:])
    assert (last.finish_reason, last.stop_reason, last.kv) == ("stop", "x", handle(9))
    assert (last.kv_bytes, last.transfer_ms) == (0, 0.0)


def test_repeated_chars_count_prompt_text_of_decode_stream() -> None:
    """vLLM's decode stream repeats the whole prompt behind half a character."""
    tokenizer, answer = make_tokenizer(), "naïve 漢字, 🦊 and 👩\u200d🚀."
    prompt = tokenizer.encode("Tell me: ").ids
    ids = tokenizer.encode(answer).ids

    def streamed(before: list[int], token_ids: list[int]) -> list[str]:
        stream = DecodeStream(ids=before, skip_special_tokens=True)
        return [stream.step(tokenizer, token) or "" for token in token_ids]

    whole, cuts = streamed(prompt, ids), 0
    assert "".join(whole) == answer
    for place in range(1, len(ids)):
        before = prompt + ids[:place]
        repeated = repeated_chars(tokenizer.decode, before)
        rest = "".join(streamed(before, ids[place:]))[repeated:]
        assert "".join(whole[:place]) + rest == answer
        cuts += repeated > 0
    assert 0 < cuts < len(ids)
