"""What may take long, in a process of its own: `python -m streams.gateway.request.checks`.

Reads one question per line and writes one answer per line, as JSON, until its input ends. A check
answers with an empty text or with what is wrong. `check_process.py` asks, and ends this process
when an answer takes too long; nothing else imports this.
"""

import json
import os
import re
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import SchemaError  # type: ignore[import-untyped]  # ships no types
from jsonschema.validators import (  # type: ignore[import-untyped]  # the same
    Draft7Validator,
    Draft202012Validator,
)
from tokenizers import Tokenizer

from schemas.errors import InvalidRequest
from streams.gateway.request.tokenizer import Tokenizer as ModelTokenizer

MEMORY_BYTES_MAX = 4 << 30
READY = "ready"


def json_schema(text: str) -> str:
    """Whether a text is a JSON schema, by fixed meta-schemas: `$schema` chooses none.

    Draft 7 allows what 2020-12 renamed; neither compares the values of an enumeration.
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
    """Whether a text is a regular expression."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        return f"not a regular expression: {error}"
    return ""


def encode(text: str, file: str, special: bool) -> list[int]:
    """Token ids of a long text."""
    (encoding,) = _tokenizer(file).encode_batch_fast([text], add_special_tokens=special)
    ids: list[int] = encoding.ids
    return ids


def chat(
    folder: str, messages: list[Any], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> dict[str, Any]:
    """Token ids of a long chat, or why the model's template refuses it."""
    tokenizer = _model_tokenizer(folder)
    try:
        pieces = tokenizer.pieces(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
    except InvalidRequest as error:
        return {"refused": [error.message, error.param]}
    return {"ids": tokenizer.ids_of(pieces)}


@cache
def _model_tokenizer(folder: str) -> ModelTokenizer:
    return ModelTokenizer(Path(folder))


@cache
def _tokenizer(file: str) -> Tokenizer:
    raw = Tokenizer.from_file(file)
    raw.no_padding()
    raw.no_truncation()
    return raw


CHECKS: dict[str, Any] = {check.__name__: check for check in (json_schema, regex, encode, chat)}


def main() -> None:
    """Answer until nobody asks any more."""
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
