"""Checks a call of the API in a prompt, as over HTTP.

A call of /v1/responses or /v1/messages becomes the chat that answers it; its answer is a response
or a message. Fields that
store a response or continue a stored one are refused, because gateways do not keep these responses.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from schemas.errors import InvalidRequest
from streams.anthropic.body import MessagesBody
from streams.anthropic.body import refuse_fields as refuse_message_fields
from streams.anthropic.chat import chat_body
from streams.calls.embedding import EmbeddingsBody, inputs_of
from streams.calls.errors import from_validation, shorten
from streams.calls.request.body import Body, ChatBody, CompletionBody
from streams.calls.request.refused import EMBEDDING_REFUSED, refuse_extras
from streams.calls.request.responses_body import ResponsesBody, refuse_fields
from streams.openai.batches import lines
from streams.openai.responses.call import ResponseCall
from streams.openai.responses.items import REFERENCE, items_of

_OF_STREAMS = ("stream", "stream_options")  # ignored: an answer is one record
_KEPT = ("store", "background", "previous_response_id", "conversation")

Json = dict[str, Any]
CallBody = ChatBody | CompletionBody | EmbeddingsBody


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A checked call: its body, and the call of /v1/responses or /v1/messages, if it is one."""

    body: CallBody
    response: ResponseCall | None = None  # answered by the body, a chat
    message: MessagesBody | None = None  # likewise


def check_call(body: Json, endpoint: str = "") -> CheckedCall:
    """Check a call's body. Raises InvalidRequest, also for a call with more than one answer."""
    body = {name: value for name, value in body.items() if name not in _OF_STREAMS}
    if endpoint == "":
        endpoint = lines.CHAT if "messages" in body else lines.COMPLETION
    match endpoint:
        case lines.RESPONSES:
            response = _response(body)
            return CheckedCall(response.chat(ignores_unserved=True), response)
        case lines.MESSAGES:
            message = _parsed(MessagesBody, body)
            refuse_message_fields(message)
            return CheckedCall(_alone(chat_body(message)), message=message)
        case lines.EMBEDDINGS:
            return CheckedCall(_embeddings(body))
        case lines.CHAT:
            return CheckedCall(_alone(_parsed(ChatBody, body)))
        case lines.COMPLETION:
            return CheckedCall(_alone(_parsed(CompletionBody, body)))
    raise InvalidRequest(
        f"endpoint: expected one of {', '.join(lines.ENDPOINTS)}, found {shorten(endpoint)}",
        "endpoint",
    )


def _parsed(kind: type[Body], body: Json) -> Body:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error


def _alone(body: Any) -> Any:
    prompt = getattr(body, "prompt", None)
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    if (body.n or 1) > 1 or several:
        raise InvalidRequest("n: expected one answer to a prompt, found more wished", "n")
    return body


def _response(body: Json) -> ResponseCall:
    for name in _KEPT:
        if body.get(name):
            raise InvalidRequest(
                f"{name}: not served for prompts and lines of batches, whose responses are not "
                "kept; leave it out",
                name,
            )
    call = _parsed(ResponsesBody, {**body, "store": False})
    refuse_fields(call)
    items = items_of(call.input, "")
    for i, item in enumerate(items):
        if item["type"] == REFERENCE:
            raise InvalidRequest(
                f"input.{i}: expected an item, found a reference to one, which is not kept for "
                "prompts and lines of batches; send the item itself",
                f"input.{i}",
            )
    return ResponseCall(body=call, items=items)


def _embeddings(body: Json) -> EmbeddingsBody:
    call = _parsed(EmbeddingsBody, body)
    refuse_extras(call.model_extra, EMBEDDING_REFUSED)
    inputs_of(call.input)
    return call
