"""The OpenAPI document: FastAPI's routes, and the plain ASGI endpoints that FastAPI does not know.

It has the answers of every call, errors included; `tests/fuzz` checks the gateway against it.
"""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from schemas.records import Priority
from streams.anthropic.body import CountTokensBody, MessagesBody
from streams.calls.embedding import EmbeddingsBody, RerankBody, ScoreBody
from streams.calls.request.body import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from streams.calls.request.responses_body import INCLUDE, ResponsesBody
from streams.config import ORCHESTRATIONS, POLICIES
from streams.gateway.endpoints.embeddings import RERANK_PATHS, SCORE_PATHS
from streams.openai.batches import shapes as batch_shapes
from streams.openai.objects import openapi_shapes
from streams.openai.objects.openapi_shapes import CONTENT, UPLOAD, UPLOAD_FORM

BODIES = openapi_shapes.BODIES | batch_shapes.BODIES
SHAPES = openapi_shapes.SHAPES | batch_shapes.SHAPES
_REF = "#/components/schemas/{model}"
_BODIES: dict[str, tuple[type[BaseModel], str, str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a chat, whole or as a stream.", "OpenAI"),
    "/v1/completions": (CompletionBody, "Continue a prompt, whole or as a stream.", "OpenAI"),
    "/v1/responses": (ResponsesBody, "Answer a chat in OpenAI's newer form.", "OpenAI"),
    "/v1/messages": (MessagesBody, "Answer a chat in Anthropic's form.", "Anthropic"),
    "/v1/messages/count_tokens": (CountTokensBody, "Count the tokens of a prompt.", "Anthropic"),
    "/v1/embeddings": (EmbeddingsBody, "Vectors of texts.", "OpenAI"),
    **dict.fromkeys(
        RERANK_PATHS, (RerankBody, "Texts by their similarity to a query.", "Cohere, Jina")
    ),
    **dict.fromkeys(SCORE_PATHS, (ScoreBody, "The similarity of texts.", "vLLM")),
    "/tokenize": (TokenizeBody, "Token ids of a prompt or of messages.", "vLLM"),
    "/detokenize": (DetokenizeBody, "The text of token ids.", "vLLM"),
}
_OF_TOKENS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_HEADERS = {
    "X-Session-Id": "The conversation; derived from the messages where it is missing.",
    "X-Priority": "interactive, standard or batch.",
    "X-Deadline-Ms": "Milliseconds from now after which the answer is worthless.",
    "X-Trivium-Weights": "What counts in placement, as ttft=0.7,tpot=0.3.",
    "X-Trivium-Policy": "The policy that is to place the request; else the deployment's.",
    "X-Trivium-Orchestration": "auto, prefill_first, decode_first or concurrent, if remote.",
    "X-Trivium-On-Disconnect": "cancel (default) or continue.",
    "X-Trivium-Event-Ids": "true: each event of a stream has an id, after which it can be resumed.",
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
_RESPONSE = "/v1/responses/{response_id}"
_JSON, _STREAM = "application/json", "text/event-stream"
_TEXT: dict[str, Any] = {"type": "string"}
_MAYBE_TEXT: dict[str, Any] = {"anyOf": [_TEXT, {"type": "null"}]}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_NUMBER: dict[str, Any] = {"type": "number"}


# Schemas of headers; other headers are free text.
_VALUES: dict[str, dict[str, Any]] = {
    "X-Priority": {"enum": [*map(str, Priority)]},
    "X-Deadline-Ms": {"type": "integer", "minimum": 1},
    "X-Trivium-Policy": {"enum": [*POLICIES]},
    "X-Trivium-Orchestration": {"enum": [*ORCHESTRATIONS]},
    "X-Trivium-On-Disconnect": {"enum": ["cancel", "continue"]},
    "X-Trivium-Event-Ids": {"enum": ["false", "true"]},
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_MODEL = _object(
    id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, root=_TEXT,
    parent=_MAYBE_TEXT, max_model_len=_COUNT,
    permission=_list(_object(id=_TEXT, object={"const": "model_permission"}, created=_COUNT)),
)  # fmt: skip
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_TEXT))
_ANTHROPIC = "/v1/messages"  # the beginning of its paths
_MESSAGE_ERROR = _object(
    type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT
)
_HEALTH = _object(status=_TEXT)
_CANCELLED = _object(id=_TEXT, object={"const": "request.cancellation"}, message=_TEXT)


def _answer(kind: str) -> dict[str, Any]:
    choices = _list(_object(index=_COUNT, finish_reason=_TEXT))
    return _object(
        id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=choices,
        usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
    )  # fmt: skip


_RESPONSE_ANSWER = _object(
    id=_TEXT, object={"const": "response"}, created_at=_COUNT, model=_TEXT, status=_TEXT,
    output=_list(_object(id=_TEXT, type=_TEXT, status=_TEXT)),
)  # fmt: skip


_MESSAGE = _object(
    id=_TEXT, type={"const": "message"}, role={"const": "assistant"}, model=_TEXT,
    content=_list(_object(type=_TEXT)), stop_reason=_TEXT,
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
)  # fmt: skip


# By path, method and status: media types, and the schema of the JSON body.
_ANSWERS: dict[tuple[str, str, str], tuple[tuple[str, ...], dict[str, Any]]] = {
    ("/v1/chat/completions", "post", "200"): ((_JSON, _STREAM), _answer("chat.completion")),
    ("/v1/completions", "post", "200"): ((_JSON, _STREAM), _answer("text_completion")),
    ("/v1/responses", "post", "200"): ((_JSON, _STREAM), _RESPONSE_ANSWER),
    (_RESPONSE, "get", "200"): ((_JSON, _STREAM), _RESPONSE_ANSWER),
    (_RESPONSE, "delete", "200"): ((_JSON,), _object(id=_TEXT, deleted={"const": True})),
    (f"{_RESPONSE}/cancel", "post", "200"): ((_JSON,), _RESPONSE_ANSWER),
    (f"{_RESPONSE}/input_items", "get", "200"): (
        (_JSON,),
        _object(object={"const": "list"}, data=_list(_object(id=_TEXT))),
    ),
    ("/v1/messages", "post", "200"): ((_JSON, _STREAM), _MESSAGE),
    ("/v1/messages/count_tokens", "post", "200"): ((_JSON,), _object(input_tokens=_COUNT)),
    ("/v1/embeddings", "post", "200"): (
        (_JSON,),
        _object(
            object={"const": "list"},
            model=_TEXT,
            data=_list(_object(index=_COUNT)),
            usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
        ),
    ),
    ("/tokenize", "post", "200"): (
        (_JSON,),
        _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    ),
    ("/detokenize", "post", "200"): ((_JSON,), _object(prompt=_TEXT)),
    (_EVENTS, "get", "200"): ((_STREAM,), {}),
    ("/v1/models", "get", "200"): ((_JSON,), _object(object={"const": "list"}, data=_list(_MODEL))),
    ("/v1/models/{model}", "get", "200"): ((_JSON,), _MODEL),
    ("/v1/requests/{request_id}", "delete", "200"): ((_JSON,), _CANCELLED),
    ("/v1/requests/{request_id}", "delete", "202"): ((_JSON,), _CANCELLED),
    ("/v1/cache/{entry_id}", "delete", "200"): (
        (_JSON,),
        _object(id=_TEXT, object={"const": "cache.entry"}, deleted={"const": True}),
    ),
    ("/health/live", "get", "200"): ((_JSON,), _HEALTH),
    ("/version", "get", "200"): ((_JSON,), _object(version=_TEXT)),
    ("/load", "get", "200"): ((_JSON,), _object(server_load=_COUNT)),
    ("/metrics", "get", "200"): (("text/plain",), {}),
}
_RANKS = _object(
    id=_TEXT, model=_TEXT, results=_list(_object(index=_COUNT, relevance_score=_NUMBER))
)
_SCORES = _object(
    id=_TEXT, object={"const": "list"}, created=_COUNT, model=_TEXT,
    data=_list(_object(index=_COUNT, object={"const": "score"}, score=_NUMBER)),
    usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
)  # fmt: skip
_ANSWERS |= {(path, "post", "200"): ((_JSON,), _RANKS) for path in RERANK_PATHS}
_ANSWERS |= {(path, "post", "200"): ((_JSON,), _SCORES) for path in SCORE_PATHS}
_VLLM_READY = (("/health", "get"), ("/ping", "get"), ("/ping", "post"))
_READY = (("/health/ready", "get"), *_VLLM_READY)
_ANSWERS |= {(*at, "503"): ((_JSON,), _HEALTH) for at in _READY}
_ANSWERS |= {(*at, "200"): ((), {}) for at in _VLLM_READY}
_ANSWERS["/health/ready", "get", "200"] = ((_JSON,), _HEALTH)
_ANSWERS |= {(*place, "200"): ((_JSON,), shape) for place, shape in SHAPES.items()}
_ANSWERS[(*CONTENT, "200")] = (("application/octet-stream",), {})
_DESCRIPTIONS = {"200": "The answer", "202": "Written to the log", "503": "Not ready, with reasons"}


def _header(name: str, doc: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "schema": _VALUES.get(name, _TEXT),
        "description": doc,
    }


def _answer_headers() -> dict[str, Any]:
    text = {"type": "string"}
    return {n: {"schema": text, "description": doc} for n, doc in _ANSWER_HEADERS.items()}


def _operation(path: str) -> dict[str, Any]:
    model, doc, tag = _BODIES[path]
    schema = {"$ref": _REF.format(model=model.__name__)}
    headers = {} if path in _OF_TOKENS else {**_HEADERS}
    if path == "/v1/responses":  # a response is resumed by its id
        del headers["Last-Event-ID"]
    return {
        "summary": doc,
        "tags": [tag],
        "parameters": [_header(*item) for item in headers.items()],
        "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}},
        "responses": {"200": {"headers": {} if path in _OF_TOKENS else _answer_headers()}},
    }


def _events_operation() -> dict[str, Any]:
    return {
        "summary": "Resume a stream after Last-Event-ID, or from its beginning on its own gateway.",
        "tags": ["Trivium"],
        "parameters": [
            {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}},
            _header("Last-Event-ID", "The id of the last event that arrived."),
        ],
        "responses": {},
    }


_WHETHER: dict[str, Any] = {"type": "boolean"}
# Routes of a stored response: summary, and parameters of the query.
_RESPONSE_CALLS: dict[tuple[str, str], tuple[str, dict[str, dict[str, Any]]]] = {
    (_RESPONSE, "get"): (
        "A stored response as it is by now, or its events after one of them.",
        {"stream": _WHETHER, "starting_after": _COUNT, "include": _list({"enum": [*INCLUDE]})},
    ),
    (_RESPONSE, "delete"): ("Know a response no more, and end it where it runs.", {}),
    (f"{_RESPONSE}/cancel", "post"): ("End a response that runs in the background.", {}),
    (f"{_RESPONSE}/input_items", "get"): (
        "What a call brought.",
        {
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
            "after": _TEXT,
        },
    ),
}


def _response_operation(doc: str, query: dict[str, dict[str, Any]]) -> dict[str, Any]:
    fields = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    name = {"name": "response_id", "in": "path", "required": True, "schema": _TEXT}
    return {"summary": doc, "tags": ["OpenAI"], "parameters": [name, *fields], "responses": {}}


def _describe_answers(operation: dict[str, Any], path: str, method: str) -> None:
    """Replace FastAPI's answers of an operation, which have neither its errors nor its types."""
    generated = operation["responses"]
    responses: dict[str, Any] = {}
    for (of_path, of_method, status), (media, schema) in _ANSWERS.items():
        if (of_path, of_method) == (path, method):
            content = {kind: {"schema": schema} if kind == _JSON else {} for kind in media}
            header_fields = {"headers": generated.get(status, {}).get("headers", {})}
            responses[status] = {
                "description": _DESCRIPTIONS[status],
                "content": content,
                **header_fields,
            }
    api = "Anthropic" if path.startswith(_ANTHROPIC) else "OpenAI"
    model = "MessageError" if api == "Anthropic" else "Error"
    ref = {"schema": {"$ref": _REF.format(model=model)}}
    wrong = {"description": f"What is wrong, as {api} says it", "content": {_JSON: ref}}
    operation["responses"] = {**responses, "default": wrong}
    if operation["tags"] != ["Operations"]:
        # A key only if the gateway has keys; the second way is that of Anthropic's clients.
        operation["security"] = [{}, {"key": []}, {"x-api-key": []}]


def _models() -> Iterable[type[BaseModel]]:
    return [*(model for model, _, _ in _BODIES.values()), *BODIES.values()]


def _add_object_bodies(paths: dict[str, Any]) -> None:
    """Add the request bodies of object routes, which FastAPI does not read."""
    for path, model in BODIES.items():
        content = {_JSON: {"schema": {"$ref": _REF.format(model=model.__name__)}}}
        paths[path]["post"]["requestBody"] = {"required": True, "content": content}
    form = {"multipart/form-data": {"schema": UPLOAD_FORM}}
    paths[UPLOAD]["post"]["requestBody"] = {"required": True, "content": form}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the whole document; it is built once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, schemas = models_json_schema(
            [(model, "validation") for model in _models()], ref_template=_REF
        )
        document["components"] = {
            "schemas": {"Error": _ERROR, "MessageError": _MESSAGE_ERROR, **schemas["$defs"]},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        }
        for path in _BODIES:
            document["paths"].setdefault(path, {})["post"] = _operation(path)
        document["paths"].setdefault(_EVENTS, {})["get"] = _events_operation()
        for (path, method), (doc, query) in _RESPONSE_CALLS.items():
            document["paths"].setdefault(path, {})[method] = _response_operation(doc, query)
        _add_object_bodies(document["paths"])
        cancel = document["paths"]["/v1/requests/{request_id}"]["delete"]
        cancel["parameters"].append(_header("X-Session-Id", _HEADERS["X-Session-Id"]))
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _describe_answers(operation, path, method)
        app.openapi_schema = document
    return app.openapi_schema
