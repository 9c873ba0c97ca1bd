"""Errors in the form of OpenAI's clients: `{"error": {"message", "type", "param", "code"}}`.

Converts the error tree, validation errors and HTTP errors to bodies and headers. Sends nothing.
"""

import re
import reprlib
from typing import Any, Final

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from schemas.errors import ClientError, InvalidRequest, TriviumError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "cancelled_error",
}
RETRY_AFTER_S: Final = 1  # other gateways or workers have room by then, if any have
_RETRY_STATUSES = (429, 503, 529)
_FOUND_CHARS_MAX = 80
# Parts that pydantic adds to a location of several types; no field has such a name.
_BRANCH = re.compile(r"(str|list\[.*|dict\[.*)$")


class _ShortRepr(reprlib.Repr):
    """Reads only a few parts of a value, however large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _FOUND_CHARS_MAX
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Shorten very large integers: Python does not convert more than 4 300 digits to text."""
        if x.bit_length() > 4 * _FOUND_CHARS_MAX:
            return "a number of very many digits"
        return super().repr_int(x, level)


_repr = _ShortRepr()


def shorten(value: Any) -> str:
    """Return the `repr` of a value, short enough for a message."""
    text = _repr.repr(value)
    return text if len(text) <= _FOUND_CHARS_MAX else text[:_FOUND_CHARS_MAX] + "..."


def error_type(status: int) -> str:
    """Return OpenAI's `type` for a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(error: TriviumError) -> bytes:
    """Return the JSON body of an error."""
    param = error.param if isinstance(error, ClientError) else None
    return plain_body(error.http_status, error.message, error.code, param)


def plain_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """Build the JSON body of an error from its parts."""
    fields = {"message": message, "type": error_type(status), "param": param, "code": code}
    return orjson.dumps({"error": fields})


def retry_headers(status: int) -> list[tuple[bytes, bytes]]:
    """Return `Retry-After` for the statuses after which clients retry."""
    if status in _RETRY_STATUSES:
        return [(b"retry-after", str(RETRY_AFTER_S).encode())]
    return []


def from_validation(error: ValidationError) -> InvalidRequest:
    """Convert the first error of a body into one sentence that names the field.

    For a field of several types, it is the error for the type that the value has.
    """
    first, *rest = error.errors(include_url=False)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return InvalidRequest(f"invalid JSON: {reason}")
    place = first["loc"][:-1]
    same_place = (detail for detail in rest if detail["loc"][: len(place)] == place)
    of_its_kind = (detail for detail in (first, *same_place) if not _is_another_kind(detail))
    return from_detail(next(of_its_kind, first))


def _is_another_kind(detail: ErrorDetails) -> bool:
    """Return whether an error only says that a value is not of one of several types."""
    *_, last = detail["loc"] or ("",)
    return detail["type"].endswith("_type") and bool(_BRANCH.match(str(last)))


def from_detail(detail: ErrorDetails | dict[str, Any]) -> InvalidRequest:
    """Convert one of pydantic's details into an InvalidRequest."""
    parts = [str(part) for part in detail["loc"] if part != "body"]
    path = ".".join(part for part in parts if not _BRANCH.match(part))
    if detail["type"] == "missing":
        return InvalidRequest(f"{path}: required, but missing", path or None)
    message = detail["msg"]
    input_text = shorten(detail["input"])
    if not path:
        return InvalidRequest(f"the body: expected a JSON object, found {input_text}")
    message = message.replace("Input should be", "expected", 1)
    message = message.replace("String should have", "expected", 1)
    if detail["type"] == "extra_forbidden":
        message = "unknown field; check its spelling or leave it out"
    if detail["type"] == "too_short":
        message = f"expected at least {detail['ctx']['min_length']} of them"
    return InvalidRequest(f"{path}: {_lower(message)}, found {input_text}", path)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
