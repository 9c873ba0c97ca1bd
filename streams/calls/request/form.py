"""The form of the answer, from any of the fields: a schema, pattern, choices, grammar or tags.

Lengths are checked here first. The check of a schema or a pattern may take long, so a child process
does it (`checks.py`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from schemas.errors import InvalidRequest
from schemas.records import Structured, StructuredKind
from streams.calls.errors import shorten
from streams.calls.request.body import GenerationBody, strings
from streams.calls.request.check_process import CHECK_MS, CHECK_PROCESS
from streams.calls.request.refused import refuse_extras

FORM_CHARS_MAX, REGEX_CHARS_MAX, CHOICES_MAX = 262_144, 8_192, 1_024

Forms = list[tuple[str, StructuredKind, Any]]


async def form_of(body: GenerationBody, tenant: str = "") -> Structured | None:
    """Return the one constraint on the form of the answer, or None.

    Raises InvalidRequest, also if the check takes too long.
    """
    forms = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if not forms:
        return None
    if len(forms) > 1:
        names = " and ".join(name for name, _, _ in forms)
        raise InvalidRequest(f"{names}: expected one form of the answer at most", forms[1][0])
    name, kind, value = forms[0]
    text = _text(name, kind, value)
    chars_max = REGEX_CHARS_MAX if kind is StructuredKind.REGEX else FORM_CHARS_MAX
    if len(text) > chars_max:
        raise InvalidRequest(
            f"{name}: expected at most {chars_max} characters, found {len(text)}", name
        )
    check = _CHECKS.get(kind)
    if check is not None and not _is_beyond(kind, text):
        try:
            wrong = await CHECK_PROCESS.check(check, text, CHECK_MS, tenant)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error.message}", name) from error
        if wrong:
            raise InvalidRequest(f"{name}: {wrong}", name)
    return Structured(kind=kind, value=text)


_CHECKS = {
    StructuredKind.JSON_SCHEMA: "json_schema",
    StructuredKind.REGEX: "regex",
    StructuredKind.STRUCTURAL_TAG: "structural_tag",
}
_TAG_FIELDS = {"format", "structures", "triggers"}


def _is_beyond(kind: StructuredKind, text: str) -> bool:
    """Return whether Python cannot check a form: its regular expressions have no Unicode property
    classes."""
    return kind is StructuredKind.REGEX and "\\p" in text.lower()


def _guided(body: GenerationBody) -> Forms:
    fields = (
        ("guided_json", StructuredKind.JSON_SCHEMA, body.guided_json),
        ("guided_regex", StructuredKind.REGEX, body.guided_regex),
        ("guided_choice", StructuredKind.CHOICE, body.guided_choice),
        ("guided_grammar", StructuredKind.GRAMMAR, body.guided_grammar),
    )
    return [(name, kind, value) for name, kind, value in fields if value is not None]


def _response_format(body: GenerationBody) -> Forms:
    form = body.response_format
    if form is None or form.type == "text":
        return []
    refuse_extras(form.model_extra)
    if form.type == "structural_tag":
        tag = form.model_dump(include={"type", *_TAG_FIELDS}, exclude_unset=True)
        return [("response_format", StructuredKind.STRUCTURAL_TAG, tag)]
    for field in sorted(_TAG_FIELDS & form.model_fields_set):
        raise InvalidRequest(
            f"response_format.{field}: needs type structural_tag", f"response_format.{field}"
        )
    if form.type == "json_object":
        return [("response_format", StructuredKind.JSON_OBJECT, None)]
    schema = None if form.json_schema is None else form.json_schema.json_schema
    if schema is None:
        raise InvalidRequest(
            "response_format.json_schema.schema: required with type json_schema, but missing",
            "response_format.json_schema.schema",
        )
    return [("response_format.json_schema.schema", StructuredKind.JSON_SCHEMA, schema)]


def _structured_outputs(body: GenerationBody) -> Forms:
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
        ("structural_tag", StructuredKind.STRUCTURAL_TAG, form.structural_tag),
    )
    return [(f"structured_outputs.{n}", kind, v) for n, kind, v in fields if v is not None]


def _text(name: str, kind: StructuredKind, value: Any) -> str:
    """Return the form as the text of a record."""
    match kind:
        case StructuredKind.JSON_SCHEMA:
            return _object_text(name, value, "a JSON schema")
        case StructuredKind.STRUCTURAL_TAG:
            return _object_text(name, value, "a structural tag")
        case StructuredKind.JSON_OBJECT:
            return ""
        case StructuredKind.CHOICE:
            if not value or not all(value):
                raise InvalidRequest(f"{name}: expected choices, none of them empty", name)
            return json.dumps(strings(name, value, CHOICES_MAX, FORM_CHARS_MAX), ensure_ascii=False)
    if not value.strip():
        raise InvalidRequest(f"{name}: expected a text, found an empty one", name)
    return str(value)


def _object_text(name: str, value: Any, kind: str) -> str:
    """Return a JSON object as text; `kind` says what it should be."""
    if isinstance(value, str):
        with _json_errors(name, kind):
            if len(value) > FORM_CHARS_MAX:
                raise ValueError(f"more than {FORM_CHARS_MAX} characters")
            value = json.loads(value)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: expected {kind}, found {shorten(value)}", name)
    return json_text(name, value, kind)


def json_text(name: str, value: Any, kind: str) -> str:
    """Return a value as compact JSON; `kind` says what it should be. Raises InvalidRequest."""
    with _json_errors(name, kind):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
        return text


@contextmanager
def _json_errors(name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise InvalidRequest(f"{name}: expected {kind}: {why}", name) from error
