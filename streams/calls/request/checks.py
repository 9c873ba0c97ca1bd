"""Slow checks in a child process: `python -m streams.calls.request.checks`.

Reads one question per line and writes one answer per line, as JSON, until its input ends. A check
answers with an empty text or with what is wrong. `check_process.py` starts this process, and ends
it when an answer takes too long; nothing else imports this module.
"""

import json
import os
import re
import resource
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import (  # type: ignore[import-untyped]  # ships no types
    SchemaError,
    ValidationError,
)
from jsonschema.validators import (  # type: ignore[import-untyped]  # the same
    Draft7Validator,
    Draft202012Validator,
)
from referencing import Registry
from referencing.exceptions import Unresolvable

from schemas.errors import InvalidRequest
from streams.calls.request.chat import Chat
from streams.calls.request.tag_check import tag_problem
from streams.calls.request.tokenizer import Tokenizer

MEMORY_BYTES_MAX = 4 << 30
SCHEMAS_MAX = 256  # compiled schemas
TOKENIZERS_MAX = 2
REASON_CHARS_MAX = 1_000
READY = "ready"


def json_schema(text: str) -> str:
    """Return why a text is no JSON schema, or an empty text; `$schema` does not select the
    meta-schema.

    Draft 7 accepts what 2020-12 renamed; neither compares the values of an enumeration.
    """
    value = json.loads(text)
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        if Draft7Validator(Draft7Validator.META_SCHEMA).is_valid(value):
            return ""
        where = ".".join(str(part) for part in error.absolute_path)
        place = f" at {where[:80]}" if where else ""
        return f"not a valid JSON schema{place}: {error.message[:200]}"
    except RecursionError:
        return "nested too deeply"
    return ""


def regex(text: str) -> str:
    """Return why a text is no regular expression, or an empty text."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        return f"not a regular expression: {error}"
    return ""


def structural_tag(text: str) -> str:
    """Return why a JSON object is no structural tag, or an empty text."""
    return tag_problem(text, json_schema, regex)


def breaks(schema: str, text: str) -> str:
    """Return why a text is no JSON value that matches a schema, or an empty text.

    References cannot point outside of the schema.
    """
    try:
        _validator(schema).validate(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError, ValidationError, Unresolvable) as error:
        return str(getattr(error, "message", error))[:REASON_CHARS_MAX]
    return ""


@lru_cache(SCHEMAS_MAX)
def _validator(schema: str) -> Any:
    value = json.loads(schema)
    is_former = not Draft202012Validator(Draft202012Validator.META_SCHEMA).is_valid(value)
    kind = Draft7Validator if is_former else Draft202012Validator
    return kind(value, registry=Registry())


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def encode(folder: str, text: str, special: bool) -> list[int]:
    """Return the token ids of a very long text."""
    return _tokenizer(folder).encoder.ids([text], add_special_tokens=special).tolist()


def chat(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids of a long chat, or why the model's template refuses it."""
    tokenizer = _tokenizer(folder)
    try:
        pieces = tokenizer.pieces(Chat(**fields))
    except InvalidRequest as error:
        return {"refused": [error.message, error.param]}
    return {"ids": tokenizer.encoder.ids(pieces).tolist()}


@lru_cache(TOKENIZERS_MAX)
def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer(Path(folder))


CHECKS: dict[str, Any] = {
    check.__name__: check for check in (json_schema, regex, structural_tag, breaks, encode, chat)
}


def main() -> None:
    """Answer questions until the input ends."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    _say(READY)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        _say(CHECKS[name](*arguments))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
