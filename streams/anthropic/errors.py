"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from collections.abc import Mapping

import orjson

from schemas.errors import ClientError, PromptTooLong, QueueFull, TriviumError

OVERLOADED = 529  # Anthropic's status for what others answer with 503
_STATUSES = {502: 500, 503: OVERLOADED}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# By parameter: the code by which the `anthropic` package goes on without it. Threads are
# conversations that a server keeps; without them its runner of tools sends whole histories.
_PARAM_CODES = {"thread": "thread_unsupported_request"}
_TOO_LONG = "prompt is too long"  # by these words Claude Code knows to shorten a conversation


def status_of(error: TriviumError) -> int:
    """Return Anthropic's HTTP status for an error."""
    if isinstance(error, QueueFull):
        return OVERLOADED
    return _STATUSES.get(error.http_status, error.http_status)


def message_error(error: TriviumError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the JSON body of an error."""
    details = {"error_code": error.code}
    if isinstance(error, ClientError) and error.param:
        details["param"] = error.param
        details["error_code"] = _PARAM_CODES.get(error.param, error.code)
    text = error.message
    if isinstance(error, PromptTooLong):
        text = f"{_TOO_LONG}: {text}"
    status = status_of(error)
    return status, error_of_status(status, text, request_id, details)


def error_of_status(status: int, text: str, request_id: str, details: Mapping[str, str]) -> bytes:
    """Return the JSON body of an error from its parts."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps(
        {
            "type": "error",
            "error": {"type": kind, "message": text, "details": details},
            "request_id": request_id or None,
        }
    )
