"""Lines of a batch: how they are read, their calls, their errors, and their answers.

Forms and codes are OpenAI's, also around calls of /v1/messages, which OpenAI's batches do not have.
At most one part of a file is in memory.
"""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from schemas.errors import BY_CODE, TriviumError, UnknownModel
from schemas.records import Answer, Prompt, StoredFile
from streams.anthropic.errors import message_error
from streams.calls.errors import plain_body, shorten
from streams.calls.request.body import BYTE_ORDER_MARK
from streams.log.slices import Slices
from streams.openai.objects.log import PART_BYTES, Objects

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
MESSAGES = "/v1/messages"
ENDPOINTS = (CHAT, COMPLETION, EMBEDDINGS, RESPONSES, MESSAGES)
LINES_MAX = 50_000
LINE_BYTES_MAX = 4 << 20
CUSTOM_ID_CHARS_MAX = 512
ERRORS_MAX = 100  # reported errors of one file
GIVEN_UP = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


class BatchFileError(Exception):
    """An error in a file; `param` names the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def as_json(self, line: int | None) -> dict[str, Any]:
        """Return the error as the API lists it."""
        return {"code": self.code, "line": line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of a file that is not blank."""

    number: int  # from 1 at the first line read; blank lines count
    text: bytes
    end: int  # offset of the byte after it in the file


@dataclass(frozen=True, slots=True)
class BatchCall:
    """One call of a batch, from its line."""

    custom_id: str
    body: dict[str, Any]

    def prompt(self, endpoint: str) -> Prompt:
        """Build the prompt that bridges answer."""
        return Prompt(body=orjson.dumps(self.body).decode(), endpoint=endpoint)


def call_of(text: bytes) -> BatchCall:
    """Return the call in a line; raises BatchFileError."""
    return _call(_object(text))


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text.removeprefix(BYTE_ORDER_MARK))
    except ValueError as error:
        raise BatchFileError(
            "invalid_json_line", f"This line is not parseable as valid JSON: {error}."
        ) from None
    if not isinstance(value, dict):
        raise BatchFileError(
            "invalid_json_line", f"Expected a JSON object, found {shorten(value)}."
        )
    return value


def _call(value: dict[str, Any]) -> BatchCall:
    custom_id, body = _field(value, "custom_id", str), _field(value, "body", dict)
    if not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        raise BatchFileError(
            "invalid_custom_id",
            f"Expected 1 to {CUSTOM_ID_CHARS_MAX} characters, found {len(custom_id)}.",
            "custom_id",
        )
    return BatchCall(custom_id, body)


def _field(value: dict[str, Any], name: str, kind: type, at: str = "") -> Any:
    field_value = value.get(name)
    if field_value is None:
        missing = f"Missing required parameter: '{at}{name}'."
        raise BatchFileError("missing_required_parameter", missing, at + name)
    if not isinstance(field_value, kind):
        expected = (
            f"expected {'an object' if kind is dict else 'a string'}, found {shorten(field_value)}"
        )
        raise BatchFileError("invalid_type", f"'{at}{name}': {expected}.", at + name)
    return field_value


class FileCheck:
    """Checks a file: `add` every line, then read `errors`."""

    def __init__(self, endpoint: str, check_model: Callable[[str], object]) -> None:
        """Check lines for an endpoint; `check_model` raises UnknownModel."""
        self._endpoint, self._check_model = endpoint, check_model
        self._digests: set[bytes] = set()
        self._errors: list[dict[str, Any]] = []
        self.total = 0

    @property
    def is_over(self) -> bool:
        """Return whether no more lines need to be read."""
        return len(self._errors) >= ERRORS_MAX or self.total > LINES_MAX

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Return the errors of the file; without any, its batch can run."""
        if self.total > LINES_MAX:
            wrong = BatchFileError("too_many_tasks", f"The file has more than {LINES_MAX} lines.")
            return [wrong.as_json(None)]
        if not self.total and not self._errors:
            return [BatchFileError("empty_file", "The file has no lines.").as_json(None)]
        return self._errors

    def add(self, number: int, text: bytes) -> None:
        """Check the next line; `number` is its number in the file."""
        self.total += 1
        try:
            self._check(text)
        except BatchFileError as wrong:
            self._errors.append(wrong.as_json(number))

    def refuse(self, number: int, wrong: BatchFileError) -> None:
        """Add an error that occurred in place of a line."""
        self._errors.append(wrong.as_json(number))

    def _check(self, text: bytes) -> None:
        value = _object(text)
        call = _call(value)
        digest = hashlib.blake2b(call.custom_id.encode(), digest_size=16).digest()
        if digest in self._digests:
            raise BatchFileError(
                "duplicate_custom_id",
                f"The custom_id {call.custom_id[:64]!r} is that of an earlier line; it must be "
                "unique in a batch.",
                "custom_id",
            )
        self._digests.add(digest)
        if (method := _field(value, "method", str)) != "POST":
            raise BatchFileError(
                "invalid_method", f"Expected POST, found {shorten(method)}.", "method"
            )
        if (url := _field(value, "url", str)) != self._endpoint:
            raise BatchFileError(
                "url_mismatch",
                f"Expected the endpoint of the batch, {self._endpoint}, found {shorten(url)}.",
                "url",
            )
        model = _field(call.body, "model", str, "body.")
        try:
            if self._endpoint != EMBEDDINGS:  # embedding workers check theirs
                self._check_model(model)
        except UnknownModel as error:
            raise BatchFileError("model_not_found", error.message, "body.model") from None
        if call.body.get("stream"):
            raise BatchFileError(
                "invalid_value", "Answers of batches are no streams.", "body.stream"
            )


def unanswered_line(line_id: str, custom_id: str, status: str) -> bytes:
    """Build the error line of a call that had no answer when its batch ended."""
    code, message = GIVEN_UP[status]
    error = {"code": code, "message": message}
    return _line(line_id, custom_id, None, error)


def answer_line(
    line_id: str, custom_id: str, answer: Answer, endpoint: str = ""
) -> tuple[bytes, bool]:
    """Return the result line of an answer of an endpoint, and whether it is an error."""
    status, body = 200, (answer.body or "").encode()
    code = answer.error_code
    if code is None and not body:
        code = TriviumError.code
    if code is not None:
        kind, message = BY_CODE.get(code, TriviumError), answer.error_message or "no answer came"
        if endpoint == MESSAGES:
            status, body = message_error(kind(message), answer.request_id)
        else:
            status, body = kind.http_status, plain_body(kind.http_status, message, code)
    response = {
        "status_code": status,
        "request_id": answer.request_id,
        "body": orjson.Fragment(body),
    }
    return _line(line_id, custom_id, response, None), code is not None


def _line(line_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    fields = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


LINES_READ_MAX = 1_000_000  # blank lines count, although no batch uses them


async def lines_of(
    objects: Objects, file: StoredFile, first_byte: int = 0
) -> AsyncGenerator[BatchLine]:
    """Yield the lines from the one that begins at `first_byte`.

    Raises BatchFileError for a line that is too long, and the errors of reading the log.
    """
    skipped, within = divmod(first_byte, PART_BYTES)
    rest = replace(file, parts=file.parts[skipped:])
    number, at, slices = 0, first_byte, Slices()
    async with contextlib.aclosing(_split(objects.read_parts(rest), within)) as texts:
        async for text in texts:
            number, at = number + 1, at + len(text)
            await slices.turn()
            if number > LINES_READ_MAX:
                message = (
                    f"Expected at most {LINES_READ_MAX} lines with the blank ones, found more."
                )
                raise BatchFileError("too_many_tasks", message)
            if text.strip():
                yield BatchLine(number, text, at)


async def _split(parts: AsyncIterator[bytes], skipped: int) -> AsyncGenerator[bytes]:
    """Split the parts into lines that keep their ends."""
    tail = b""
    async with contextlib.aclosing(parts):  # type: ignore[type-var]  # every reader is a generator
        async for part in parts:
            *lines, tail = (tail + part[skipped:]).split(b"\n")
            skipped = 0
            for line in lines:
                yield line + b"\n"
            if len(tail) > LINE_BYTES_MAX:
                raise BatchFileError(
                    "line_too_long", f"Expected at most {LINE_BYTES_MAX} bytes, found more."
                )
    if tail:
        yield tail
