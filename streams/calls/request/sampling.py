"""Sampling parameters and the form of the answer: from a validated body to the record for engines.

Checks values that depend on several fields or on the model. Every field of the result has a value,
the seed too, so that another worker can compute the answer again.
"""

import random
from typing import Any

from schemas.errors import InvalidRequest
from schemas.records import Sampling, Structured
from streams.calls.errors import shorten
from streams.calls.request.body import ChatBody, CompletionBody, GenerationBody

COMPLETION_TOKENS = 16  # OpenAI's default of the completions endpoint
STOPS_MAX, STOP_IDS_MAX, BIASES_MAX, BAD_WORDS_MAX = 16, 128, 1_024, 256
STOP_CHARS_MAX, BAD_WORD_CHARS_MAX = 1_024, 256  # of each
SEED_BITS = 53  # JSON readers with doubles keep such a seed exactly


def sampling_of(
    body: GenerationBody, form: Structured | None, *, prompt_tokens: int, limit: int, vocab: int
) -> Sampling:
    """Return the parameters for one prompt. `form` is the form of the answer from `form.py`,
    `limit` the largest number of tokens of prompt and answer together."""
    max_tokens = _max_tokens(body, limit - prompt_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: expected at most max_tokens={max_tokens}, found {min_tokens}",
            "min_tokens",
        )
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        # top_p=0 leaves only the most likely token; engines do not accept 0.
        temperature=0.0 if body.top_p == 0 else _or(body.temperature, 1.0),
        top_p=body.top_p or 1.0,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(SEED_BITS) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        stop=strings("stop", body.stop, STOPS_MAX, STOP_CHARS_MAX),
        stop_token_ids=_token_ids(body.stop_token_ids, vocab),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=_logprobs(body),
        logit_bias=_biases(body.logit_bias, vocab),
        bad_words=strings("bad_words", body.bad_words, BAD_WORDS_MAX, BAD_WORD_CHARS_MAX),
        structured=form,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: GenerationBody, free_tokens: int) -> int:
    max_tokens = body.max_tokens
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
    elif max_tokens is None:
        max_tokens = min(COMPLETION_TOKENS, free_tokens)
    return free_tokens if max_tokens is None else max_tokens


def strings(name: str, value: Any, count_max: int, chars_max: int) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple, within bounds; raises InvalidRequest."""
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and len(values) > count_max:
        raise InvalidRequest(f"{name}: expected at most {count_max}, found {len(values)}", name)
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise InvalidRequest(
            f"{name}: expected a string or a list of strings, none of them empty, "
            f"found {shorten(value)}",
            name,
        )
    longest = max(map(len, values), default=0)
    if longest > chars_max:
        raise InvalidRequest(
            f"{name}: expected at most {chars_max} characters, found {longest}", name
        )
    return tuple(values)


def _token_ids(value: list[int] | None, vocab: int) -> tuple[int, ...]:
    for token_id in value or ():
        if not 0 <= token_id < vocab:
            raise InvalidRequest(
                f"stop_token_ids: expected token ids from 0 to {vocab - 1}, found {token_id}",
                "stop_token_ids",
            )
    if value and len(value) > STOP_IDS_MAX:
        raise InvalidRequest(
            f"stop_token_ids: expected at most {STOP_IDS_MAX}, found {len(value)}",
            "stop_token_ids",
        )
    return tuple(value or ())


def _logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        if body.logprobs:
            return body.top_logprobs or 0
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs=true", "top_logprobs")
        return None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _biases(value: Any, vocab: int) -> dict[str, float]:
    if value is None or value == {}:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"logit_bias: expected an object of numbers, found {shorten(value)}", "logit_bias"
        )
    if len(value) > BIASES_MAX:
        raise InvalidRequest(
            f"logit_bias: expected at most {BIASES_MAX} tokens, found {len(value)}", "logit_bias"
        )
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab):
            raise InvalidRequest(
                f"logit_bias: expected token ids from 0 to {vocab - 1}, found {key[:40]!r}",
                "logit_bias",
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias.{key}: expected a bias from -100 to 100, found {shorten(bias)}",
                f"logit_bias.{key}",
            )
    return {str(int(key)): float(bias) for key, bias in value.items()}
