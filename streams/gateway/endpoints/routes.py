"""The other routes, on plain FastAPI: models, tokenize, cancellation, health and metrics.

vLLM's routes that do not generate are among them, under vLLM's names.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute

from schemas.errors import InvalidRequest, NotFound
from schemas.fleet import Member
from schemas.records import Cancellation, CancelReason, EmbedCapability, MemberKind, MemberState
from schemas.rules.embedders import public_name
from schemas.settings import ALIAS
from streams.anthropic.models import VERSION_HEADER, model_info, model_page
from streams.calls.config import GatewaySettings
from streams.calls.errors import RETRY_AFTER_S, shorten
from streams.calls.ids import STORE_PREFIX, from_public, new_request_id, session_of
from streams.calls.request.body import DetokenizeBody, TokenizeBody
from streams.calls.request.chat import chat_of
from streams.calls.request.intake import chat_prompt, check_length
from streams.calls.request.refused import refuse_extras
from streams.calls.request.served import ModelCard, ServedModel
from streams.calls.request.tools import tools_of
from streams.gateway.endpoints.answer_cache import evict
from streams.gateway.endpoints.batches import call_batch_routes
from streams.gateway.endpoints.conversations import conversation_routes
from streams.gateway.endpoints.files import file_routes
from streams.gateway.endpoints.store_files import batch_routes, store_file_routes
from streams.gateway.endpoints.vector_stores import store_routes
from streams.gateway.http.entry import headers_of
from streams.gateway.state import Gateway
from streams.log.clock import wall_ms

_ID_CHARS_MAX = 64


def identify(response: Response) -> None:
    """Add a request id to a response."""
    response.headers["x-request-id"] = new_request_id(wall_ms())


def make_routes(gateway: Gateway) -> list[BaseRoute]:
    """Build the routes of a gateway.

    The app takes them as a list and includes no router: FastAPI would build each route again for
    each included router, which takes twice as long as the rest of the app.
    """

    def authorise(request: Request) -> None:
        gateway.callers.tenant_of(request)

    async def catch_up() -> None:
        await gateway.objects.catch_up()

    router = APIRouter(dependencies=[Depends(identify)])
    guarded = APIRouter(dependencies=[*router.dependencies, Depends(authorise)])
    of_objects = APIRouter(dependencies=[*guarded.dependencies, Depends(catch_up)])

    @guarded.get("/v1/models", tags=["OpenAI"])
    async def list_models(request: Request) -> dict[str, Any]:
        """List the names that a call may use as its model, in the form of the caller's API."""
        models = list(_models(gateway).values())
        if VERSION_HEADER in request.headers:
            return model_page(models)
        return {"object": "list", "data": models}

    @guarded.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def get_model(model: str, request: Request) -> dict[str, Any]:
        """Return a model by its name, in the form of the caller's API."""
        known_model = _models(gateway).get(model) or _model_named(gateway, model)
        return model_info(known_model) if VERSION_HEADER in request.headers else known_model

    @guarded.post("/tokenize", tags=["vLLM"])
    async def tokenize(request: Request) -> dict[str, Any]:
        """Tokenize a prompt, or messages in the model's chat template."""
        body = await gateway.callers.read_body(request, TokenizeBody)
        tenant = gateway.callers.tenant_of(request)
        served = await gateway.models.model_named(body.model)
        return await _tokenize(served, body, gateway.settings, tenant)

    @guarded.post("/detokenize", tags=["vLLM"])
    async def detokenize(request: Request) -> dict[str, Any]:
        """Return the text of token ids."""
        body = await gateway.callers.read_body(request, DetokenizeBody)
        refuse_extras(body.model_extra)
        return _detokenize(await gateway.models.model_named(body.model), body)

    @guarded.delete("/v1/requests/{request_id}", tags=["Trivium"])
    async def cancel(request_id: str, request: Request, response: Response) -> dict[str, Any]:
        """Cancel a request: its work stops on every worker, and its stream ends with an error.

        If another gateway answers the request, send its session id in `X-Session-Id`. The gateway
        then writes the cancellation to the log and answers 202. The router checks whether the
        request is still running and belongs to the caller.
        """
        return await _cancel(gateway, from_public(request_id), request, response)

    @guarded.delete("/v1/cache/{entry_id}", tags=["Trivium"])
    async def drop_kept(entry_id: str, request: Request) -> dict[str, Any]:
        """Evict a cached answer; its id is `trivium.cache.id` in the answer."""
        await evict(gateway, entry_id, gateway.callers.tenant_of(request))
        return {"id": entry_id, "object": "cache.entry", "deleted": True}

    callers, objects = gateway.callers, gateway.objects
    file_routes(callers, objects, of_objects)
    call_batch_routes(callers, objects, of_objects)
    store_routes(callers, objects, gateway.pool, of_objects)
    store_file_routes(callers, objects, gateway.settings.parse_ms, of_objects)
    batch_routes(callers, objects, of_objects)
    conversation_routes(gateway, of_objects)

    _add_operations(gateway, router)
    return [*router.routes, *guarded.routes, *of_objects.routes]


def _add_operations(gateway: Gateway, router: APIRouter) -> None:
    """Add the routes for probes and monitors, which need no key."""

    @router.get("/health/live", tags=["Operations"])
    async def live() -> dict[str, str]:
        """Answer ok while the process runs."""
        return {"status": "ok"}

    @router.get("/health/ready", tags=["Operations"])
    async def ready() -> Response:
        """Answer 200 if calls of any model can be answered, with a reason for each model whose
        calls cannot; else 503 with the reasons."""
        return _readiness(gateway.calls.problems(), gateway.calls.unserved())

    @router.get("/health", tags=["Operations"])
    @router.get("/ping", tags=["Operations"])
    @router.post("/ping", tags=["Operations"])
    async def health() -> Response:
        """Answer 200 without a body, as vLLM does, if calls can be answered; else as
        /health/ready."""
        problems = gateway.calls.problems()
        return _readiness(problems) if problems else Response(headers=_request_id())

    @router.get("/version", tags=["Operations"])
    async def version(request: Request) -> dict[str, str]:
        """Return the version of Trivium that runs."""
        return {"version": request.app.version}

    @router.get("/load", tags=["Operations"])
    async def load() -> dict[str, int]:
        """Return the number of answers in flight at this gateway."""
        return {"server_load": gateway.calls.in_flight}

    @router.get("/metrics", tags=["Operations"])
    async def metrics() -> Response:
        """Return the Prometheus metrics of this gateway."""
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4")


def _readiness(problems: Sequence[str], unserved: Sequence[str] = ()) -> Response:
    headers = _request_id()
    if problems:
        headers["retry-after"] = str(RETRY_AFTER_S)
    body = {"status": "not ready" if problems else "ok", "reasons": [*problems, *unserved]}
    return JSONResponse(body, 503 if problems else 200, headers)


def _request_id() -> dict[str, str]:
    return {"x-request-id": new_request_id(wall_ms())}


def _models(gateway: Gateway) -> dict[str, dict[str, Any]]:
    """Return the models by name: models and adapters, alone and with each collection that they can
    read, and embedding models.

    Collections have no owners, so they are listed only if the gateway has no API keys.
    """
    settings, cards = gateway.settings, gateway.models.cards.values()
    models = {card.name: _generating(card, card.name) for card in cards}
    for collection in () if settings.api_keys else _collections(gateway):
        if collection == settings.cache_collection or collection.startswith(STORE_PREFIX):
            continue
        for card in cards:
            if not card.reads_passages:
                continue
            name = f"{card.name}{ALIAS}{collection}"
            models[name] = _generating(card, name)
    for capability in _embedders(gateway):
        name = public_name(capability.embedder)
        models.setdefault(name, _embedding_model(gateway, name, capability))
    return models


def _model_named(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return a model that is valid but not listed; raises UnknownModel."""
    for capability in _embedders(gateway):
        if name == capability.embedder:
            return _embedding_model(gateway, name, capability)
    card, _ = gateway.models.find(name)
    return _generating(card, name)


def _ready_workers(gateway: Gateway) -> Iterator[Member]:
    living = gateway.calls.fleet.living(MemberKind.WORKER)
    return (member for member in living if member.state is MemberState.READY)


def _embedders(gateway: Gateway) -> list[EmbedCapability]:
    capabilities = (member.registration.embedding for member in _ready_workers(gateway))
    return [capability for capability in capabilities if capability is not None]


def _collections(gateway: Gateway) -> list[str]:
    loads = (member.search for member in _ready_workers(gateway))
    return sorted({collection.name for load in loads if load for collection in load.collections})


def _generating(card: ModelCard, name: str) -> dict[str, Any]:
    """Return a model or an adapter under one of its names, with its parsers. An adapter's parent is
    its model, and its root the name of its folder, as vLLM tells."""
    root = card.root or card.model
    parsers = {"tool_parser": card.parsers.tool, "reasoning_parser": card.parsers.reasoning}
    model = _model(name, card.created_s, card.max_model_len, root=root)
    return {**model, "parent": card.model if card.adapter else None, **parsers}


def _embedding_model(gateway: Gateway, name: str, capability: EmbedCapability) -> dict[str, Any]:
    created_s = gateway.models.default.card.created_s
    return _model(name, created_s, capability.tokens_max, root=name, generates=False)


def _model(
    name: str, created_s: int, max_model_len: int, *, root: str, generates: bool = True
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "trivium",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [_permission(name, created_s, generates=generates)],
    }


def _permission(name: str, created_s: int, *, generates: bool) -> dict[str, Any]:
    """Return what a caller may do with a model, in the form that OpenAI had and vLLM has. Its id
    depends on the model's name only."""
    return {
        "id": f"modelperm-{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": generates,
        "allow_logprobs": generates,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def _detokenize(served: ServedModel, body: DetokenizeBody) -> dict[str, str]:
    vocab = served.tokenizer.vocab
    if (highest := max(body.tokens, default=0)) >= vocab:
        raise InvalidRequest(
            f"tokens: expected ids below {vocab}, found {shorten(highest)}", "tokens"
        )
    return {"prompt": served.tokenizer.text(body.tokens)}


async def _tokenize(
    served: ServedModel, body: TokenizeBody, settings: GatewaySettings, tenant: str
) -> dict[str, Any]:
    refuse_extras(body.model_extra)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: expected either prompt or messages", "prompt")
    if body.messages is not None:
        chat = chat_of(body, body.messages, served.tokenizer.template, tools_of(body))
        tokens = await chat_prompt(chat, served, settings, tenant)
    else:
        special = body.add_special_tokens is not False
        check_length(len(body.prompt or ""), "prompt", served, settings)
        tokens = await served.tokenizer.encode(
            body.prompt or "",
            add_special_tokens=special,
            tenant=tenant,
        )
    texts = map(served.tokenizer.token_text, tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": served.card.max_model_len,
        "tokens": tokens.tolist(),
        "token_strs": texts and [*texts],
    }


async def _cancel(
    gateway: Gateway, request_id: str, request: Request, response: Response
) -> dict[str, Any]:
    headers = headers_of(request.scope)
    session_id = session_of(headers)
    tenant = gateway.callers.keys.tenant(headers)
    call = gateway.calls.find_call(request_id, tenant)
    if call is not None:
        await gateway.calls.cancel(call, CancelReason.CLIENT_REQUEST)
        return _cancellation_json(request_id, "the request is being cancelled")
    if session_id is None:
        raise NotFound(
            f"{request_id[:_ID_CHARS_MAX]}: not being answered by this gateway; if another one "
            "answers it, send its session id as X-Session-Id"
        )
    if not request_id or len(request_id) > _ID_CHARS_MAX:
        raise InvalidRequest("request_id: expected the id of a request", "request_id")
    record = Cancellation(
        request_id=request_id,
        session_id=session_id,
        reason=CancelReason.CLIENT_REQUEST,
        at_ms=wall_ms(),
        tenant=tenant,
    )
    await gateway.calls.log.send(record)
    response.status_code = 202
    return _cancellation_json(
        request_id,
        "this gateway does not answer the request; the cancellation was written to its session "
        "and takes effect if the request is yours and still running (with several choices: name "
        "each, as <id>-0, <id>-1, ...)",
    )


def _cancellation_json(request_id: str, message: str) -> dict[str, Any]:
    return {"id": request_id, "object": "request.cancellation", "message": message}
