"""Sampling parameters and the form of the answer: from a body that pydantic passed to the record
that engines get.

Checks what depends on several fields or on the model. Every field of the result has a value; the
seed too, so that an answer can be computed again on another worker.
"""

import json
import random
import re
from typing import Any

from jsonschema import SchemaError  # type: ignore[import-untyped]  # ships no types
from jsonschema.validators import validator_for  # type: ignore[import-untyped]  # the same

from schemas.errors import InvalidRequest
from schemas.records import Sampling, Structured, StructuredKind
from streams.gateway.bodies import ChatBody, CompletionBody, GenerationBody
from streams.gateway.fields import refuse_extras

COMPLETION_TOKENS = 16  # OpenAI's default of the completions endpoint
STOPS_MAX, STOP_IDS_MAX, BIASES_MAX, BAD_WORDS_MAX, CHOICES_MAX = 16, 128, 1_024, 256, 1_024
FORM_CHARS_MAX = 262_144
SEED_BITS = 53  # a seed survives JSON readers that hold numbers as doubles


def sampling_of(body: GenerationBody, *, prompt_tokens: int, limit: int, vocab: int) -> Sampling:
    """The parameters for one prompt; `limit` is what prompt and answer may have together."""
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
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(SEED_BITS) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        stop=_strings("stop", body.stop, STOPS_MAX),
        stop_token_ids=_token_ids(body.stop_token_ids, vocab),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=_logprobs(body),
        logit_bias=_biases(body.logit_bias, vocab),
        bad_words=_strings("bad_words", body.bad_words, BAD_WORDS_MAX),
        structured=structured_of(body),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: GenerationBody, room: int) -> int:
    wanted = body.max_tokens
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            wanted = body.max_completion_tokens
    elif wanted is None:
        wanted = min(COMPLETION_TOKENS, room)
    return room if wanted is None else wanted


def _strings(name: str, value: Any, count_max: int) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise InvalidRequest(
            f"{name}: expected a string or a list of strings, none of them empty, "
            f"found {str(value)[:80]!r}",
            name,
        )
    if len(values) > count_max:
        raise InvalidRequest(f"{name}: expected at most {count_max}, found {len(values)}", name)
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


def _biases(value: dict[str, float] | None, vocab: int) -> dict[str, float]:
    if not value:
        return {}
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
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias.{key}: expected a bias from -100 to 100, found {bias}", "logit_bias"
            )
    return {str(int(key)): bias for key, bias in value.items()}


def structured_of(body: GenerationBody) -> Structured | None:
    """The one constraint on the form of the answer, whichever way it was given."""
    found = _response_format(body) + _structured_outputs(body)
    for name, kind in (
        ("guided_json", StructuredKind.JSON_SCHEMA),
        ("guided_regex", StructuredKind.REGEX),
        ("guided_choice", StructuredKind.CHOICE),
        ("guided_grammar", StructuredKind.GRAMMAR),
    ):
        value = getattr(body, name)
        if value is not None:
            found.append((name, kind, value))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise InvalidRequest(f"{names}: expected one form of the answer at most", found[1][0])
    name, kind, value = found[0]
    text = _FORMS[kind](name, value)
    if len(text) > FORM_CHARS_MAX:
        raise InvalidRequest(
            f"{name}: expected at most {FORM_CHARS_MAX} characters, found {len(text)}", name
        )
    return Structured(kind=kind, value=text)


Found = list[tuple[str, StructuredKind, Any]]


def _response_format(body: GenerationBody) -> Found:
    form = body.response_format
    if form is None or form.type == "text":
        return []
    refuse_extras(form.model_extra)
    if form.type == "json_object":
        return [("response_format", StructuredKind.JSON_OBJECT, None)]
    schema = None if form.json_schema is None else form.json_schema.json_schema
    if schema is None:
        raise InvalidRequest(
            "response_format.json_schema.schema: required with type json_schema, but missing",
            "response_format.json_schema.schema",
        )
    return [("response_format.json_schema.schema", StructuredKind.JSON_SCHEMA, schema)]


def _structured_outputs(body: GenerationBody) -> Found:
    form = body.structured_outputs
    if form is None:
        return []
    for name in form.model_extra or ():
        raise InvalidRequest(f"structured_outputs.{name}: unknown field", "structured_outputs")
    fields = (
        ("json", StructuredKind.JSON_SCHEMA, form.json_),
        ("json_object", StructuredKind.JSON_OBJECT, form.json_object or None),
        ("regex", StructuredKind.REGEX, form.regex),
        ("choice", StructuredKind.CHOICE, form.choice),
        ("grammar", StructuredKind.GRAMMAR, form.grammar),
    )
    return [(f"structured_outputs.{n}", kind, v) for n, kind, v in fields if v is not None]


def _schema_text(name: str, value: dict[str, Any] | str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidRequest(f"{name}: expected a JSON schema: {error}", name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: expected a JSON schema, found {str(value)[:80]!r}", name)
    try:
        validator_for(value).check_schema(value)
    except SchemaError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        raise InvalidRequest(
            f"{name}: not a valid JSON schema{' at ' + where if where else ''}: {error.message}",
            name,
        ) from error
    except RecursionError as error:
        raise InvalidRequest(f"{name}: nested too deeply", name) from error
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _regex_text(name: str, value: str) -> str:
    try:
        if (
            "\\p" not in value.lower()
        ):  # classes by Unicode property: engines know them, re does not
            re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{name}: not a regular expression: {error}", name) from error
    return _plain_text(name, value)


def _plain_text(name: str, value: str) -> str:
    if not value.strip():
        raise InvalidRequest(f"{name}: expected a text, found an empty one", name)
    return value


def _choice_text(name: str, value: list[str]) -> str:
    if not value or not all(value):
        raise InvalidRequest(f"{name}: expected choices, none of them empty", name)
    return json.dumps(list(_strings(name, value, CHOICES_MAX)), ensure_ascii=False)


_FORMS: dict[StructuredKind, Any] = {
    StructuredKind.JSON_SCHEMA: _schema_text,
    StructuredKind.JSON_OBJECT: lambda name, value: "",
    StructuredKind.REGEX: _regex_text,
    StructuredKind.CHOICE: _choice_text,
    StructuredKind.GRAMMAR: _plain_text,
}
