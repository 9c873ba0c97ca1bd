"""The OpenAPI page: FastAPI's own routes, and the endpoints on the path, which FastAPI does not
know.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from streams.gateway.bodies import ChatBody, CompletionBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, tuple[type[BaseModel], str, str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a chat, whole or as a stream.", "OpenAI"),
    "/v1/completions": (CompletionBody, "Continue a prompt, whole or as a stream.", "OpenAI"),
    "/tokenize": (TokenizeBody, "Token ids of a prompt or of messages.", "Trivium"),
}
_HEADERS = {
    "X-Session-Id": "The conversation; derived from the messages where it is missing.",
    "X-Priority": "interactive, standard or batch.",
    "X-Deadline-Ms": "Milliseconds from now after which the answer is worthless.",
    "X-Trivium-Weights": "What counts in placement, as ttft=0.7,tpot=0.3.",
    "X-Trivium-Policy": "The policy that is to place the request; else the deployment's.",
    "X-Trivium-Orchestration": "auto, prefill_first, decode_first or concurrent, if remote.",
    "X-Trivium-On-Disconnect": "cancel (default) or continue.",
    "Last-Event-ID": "Resume the stream after this event, on any gateway; the body is ignored.",
}
_ANSWER_HEADERS = {
    "X-Trivium-Request-Id": "The id of the request on the log, for `trivium explain`.",
    "X-Trivium-Mode": "remote, local or replica; left out, as all below, while it is not known.",
    "X-Trivium-Orchestration": "prefill_first, decode_first or concurrent.",
    "X-Trivium-Prefill-Worker": "The worker that computed the prompt.",
    "X-Trivium-Decode-Worker": "The worker that generated.",
}
_EVENTS = "/v1/requests/{request_id}/events"


def _header(name: str, doc: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": doc,
    }


def _answer_headers() -> dict[str, Any]:
    text = {"type": "string"}
    return {n: {"schema": text, "description": doc} for n, doc in _ANSWER_HEADERS.items()}


def _operation(path: str) -> dict[str, Any]:
    model, doc, tag = _BODIES[path]
    schema = {"$ref": _REF.format(model=model.__name__)}
    content: dict[str, Any] = {"application/json": {}}
    if path != "/tokenize":
        content["text/event-stream"] = {}
    return {
        "summary": doc,
        "tags": [tag],
        "parameters": [] if path == "/tokenize" else [_header(*item) for item in _HEADERS.items()],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "The answer",
                "headers": {} if path == "/tokenize" else _answer_headers(),
                "content": content,
            },
            "default": {"description": "An error body as OpenAI's"},
        },
    }


def _events_operation() -> dict[str, Any]:
    return {
        "summary": "Resume a stream after Last-Event-ID, or from its beginning on its own gateway.",
        "tags": ["Trivium"],
        "parameters": [
            {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}},
            _header("Last-Event-ID", "The id of the last event that arrived."),
        ],
        "responses": {
            "200": {"description": "Events", "content": {"text/event-stream": {}}},
            "default": {"description": "An error body as OpenAI's"},
        },
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document; built once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, schemas = models_json_schema(
            [(model, "validation") for model, _, _ in _BODIES.values()], ref_template=_REF
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        for path in _BODIES:
            document["paths"].setdefault(path, {})["post"] = _operation(path)
        document["paths"].setdefault(_EVENTS, {})["get"] = _events_operation()
        app.openapi_schema = document
    return app.openapi_schema
