"""The gateway process: the FastAPI app, the connection to the log, and the HTTP server.

`create_app` needs no log and no socket. `run_gateway` builds all parts, serves, and drains on
`stop`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from schemas.codec import Codec
from schemas.errors import TriviumError
from schemas.records import Endpoint
from schemas.settings import LogSettings, ModelSettings
from streams.anthropic.errors import error_of_status, message_error
from streams.calls.config import GatewaySettings
from streams.calls.errors import error_body, from_detail, plain_body, retry_headers
from streams.calls.ids import SESSION_IDLE_MS, new_request_id
from streams.calls.log.member import CallMember
from streams.calls.log.turns import TurnTopic
from streams.calls.process import CallProcess, load_models
from streams.gateway.endpoints.conversations import settle_forever
from streams.gateway.endpoints.docs_page import DocsPage
from streams.gateway.endpoints.embeddings import (
    RERANK_PATHS,
    SCORE_PATHS,
    embeddings,
    rerank,
    score,
)
from streams.gateway.endpoints.generate import generate
from streams.gateway.endpoints.messages import (
    COUNT_TOKENS,
    MESSAGES,
    count_tokens,
    create_message,
)
from streams.gateway.endpoints.openapi import describe
from streams.gateway.endpoints.responses import create
from streams.gateway.endpoints.resume import events
from streams.gateway.endpoints.routes import make_routes
from streams.gateway.endpoints.stored_responses import cancel, delete, input_items, retrieve
from streams.gateway.http.entry import AsgiEndpoint, ErrorForm, Handler, RootApp, openai_error
from streams.gateway.http.listener import inherit_listener, listen
from streams.gateway.http.server import GatewayServer, allow_files, make_server
from streams.gateway.state import Gateway
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms
from streams.openai.batches.batch_runner import BatchRunner
from streams.openai.indexing.indexer import Indexer
from streams.openai.objects.log import ObjectLog
from streams.openai.responses.log import ResponseTopic

logger = logging.getLogger(__name__)
_LOOK_S = 0.05
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(gateway: Gateway) -> RootApp:
    """Build the app of a gateway. The endpoints that generate are plain ASGI, the others are
    FastAPI."""

    def endpoint(name: str, handler: Handler, form: ErrorForm = openai_error) -> AsgiEndpoint:
        return AsgiEndpoint(name, handler, gateway.metrics.count_outcome, form)

    vectors = (gateway.callers, gateway.pool, gateway.settings)
    posts = {
        "/v1/chat/completions": endpoint("chat", partial(generate, gateway, Endpoint.CHAT)),
        "/v1/completions": endpoint("completion", partial(generate, gateway, Endpoint.COMPLETION)),
        "/v1/embeddings": endpoint("embeddings", partial(embeddings, *vectors)),
        **dict.fromkeys(RERANK_PATHS, endpoint("rerank", partial(rerank, *vectors))),
        **dict.fromkeys(SCORE_PATHS, endpoint("score", partial(score, *vectors))),
        "/v1/responses": endpoint("responses", partial(create, gateway)),
        MESSAGES: endpoint("messages", partial(create_message, gateway), message_error),
        COUNT_TOKENS: endpoint("count_tokens", partial(count_tokens, gateway), message_error),
    }
    app = FastAPI(
        title="Trivium",
        version=_version(),
        description="OpenAI-compatible gateway.",
        docs_url=None,
        redoc_url=None,
    )
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # FastAPI's documented way

    app.router.routes += [
        Route("/docs", DocsPage(lambda: describe(app)).answer),
        *(Route(path, post, methods=["POST"]) for path, post in posts.items()),
        Route(
            "/v1/requests/{request_id}/events",
            endpoint("events", partial(events, gateway)),
            methods=["GET"],
        ),
        *(
            Route(f"/v1/responses/{{response_id}}{path}", endpoint(name, at), methods=[method])
            for path, method, name, at in (
                ("", "GET", "response", partial(retrieve, gateway)),
                ("", "DELETE", "response.delete", partial(delete, gateway)),
                ("/cancel", "POST", "response.cancel", partial(cancel, gateway)),
                ("/input_items", "GET", "response.input", partial(input_items, gateway)),
            )
        ),
        *make_routes(gateway),
    ]
    _handle_errors(app)
    return RootApp(app, posts, gateway.settings)


def _version() -> str:
    try:
        return version("trivium")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"


def _handle_errors(app: FastAPI) -> None:
    def respond(status: int, body: bytes, extra: dict[str, str] | None = None) -> Response:
        headers = {k.decode(): v.decode() for k, v in retry_headers(status)}
        headers |= {"x-request-id": new_request_id(wall_ms()), **(extra or {})}
        return Response(body, status, headers, media_type="application/json")

    @app.exception_handler(TriviumError)
    async def ours(request: Request, error: TriviumError) -> Response:
        extra = {"www-authenticate": "Bearer"} if error.http_status == 401 else None
        return respond(error.http_status, error_body(error), extra)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return respond(400, error_body(from_detail(error.errors()[0])))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        status, detail = error.status_code, error.detail
        if status == 405 and request.method == "POST" and request.path_params:
            status, detail = 404, "no such call"  # the path has a call's name in the place of an id
        message = f"{request.method} {request.url.path}: {detail}; see /docs"
        code = _HTTP_CODES.get(status, "http_error")
        body = plain_body(status, message, code)
        if request.url.path.startswith(MESSAGES):
            body = error_of_status(status, message, "", {"error_code": code})
        return respond(status, body, dict(error.headers or {}) if status != 404 else {})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        message = "an error of the gateway; its log has the details"
        return respond(500, plain_body(500, message, "internal_error"))


async def run_gateway(
    log: LogSettings,
    gateway: GatewaySettings,
    models: Sequence[ModelSettings],
    *,
    gateway_id: str,
    stop: asyncio.Event,
    codec: Codec | None = None,
    embedders: Collection[str] = (),
) -> None:
    """Serve until `stop` is set, then drain. Raises the errors from which the gateway cannot
    recover. The first of the models serves calls that name none. `embedders` are the names of the
    embedding models.

    The socket listens at once. Calls wait in its backlog until the log is joined and workers are
    ready, for at most `gateway.wait_ms`. After that, they get status 503 until both are there.
    """
    served = await load_models(models, gateway.tokenizers_max)
    allow_files(gateway.connections_max)
    inherited_socket = inherit_listener()
    sock = inherited_socket or listen(gateway.host, gateway.port)
    url = "http://{}:{}".format(*sock.getsockname()[:2])
    codec = codec or Codec()
    process = CallProcess.build(
        *(log, codec, gateway, served),
        process_id=gateway_id,
        url=url,
        embedders=embedders,
    )
    member, sender = process.member, process.sender
    objects = ObjectLog.build(log, codec, gateway, sender, gateway_id)
    responses = ResponseTopic(
        *(log, codec),
        gateway_id=gateway_id,
        accept_ms=gateway.accept_ms,
        producer=sender.started,
    )
    turns = TurnTopic(
        *(log, codec),
        gateway_id=gateway_id,
        back_ms=SESSION_IDLE_MS,
        producer=sender.started,
        bury=sender.bury,
    )
    state = Gateway(
        *(process.calls, process.metrics),
        tokens=process.tokens,
        responses=responses,
        objects=objects,
        pool=process.pool,
        publish_turn=turns.publish,
    )
    turns.on_turn = state.conversations.add
    logger.info("%s: serving %s at %s", gateway_id, ", ".join(served.cards), url)
    indexer = Indexer(
        *(log, codec, objects, member.view),
        is_first=member.is_first,
        parse_ms=gateway.parse_ms,
    )
    carrier = BatchRunner(
        *(log, codec, objects),
        is_first=member.is_first,
        check_model=served.find,
    )
    topics = (
        *(objects.read(), process.reporter.write()),
        *(turns.read(), responses.follow(), turns.publish_pending()),
    )
    works = (
        *(member.run(*topics), process.calls.sweep_forever(), indexer.run(), carrier.run()),
        settle_forever(state, member.is_first),
    )
    try:
        await _serve(
            state,
            member,
            works,
            sock,
            stop,
            is_ready=lambda: objects.is_read and not member.problems(),
            is_inherited=inherited_socket is not None,
        )
    finally:
        await process.pool.close()


async def _serve(
    gateway: Gateway,
    member: CallMember,
    works: Iterable[Coroutine[Any, Any, None]],
    sock: socket.socket,
    stop: asyncio.Event,
    *,
    is_ready: Callable[[], bool],
    is_inherited: bool,
) -> None:
    """Serve until `stop` is set or a task ends, then drain. If the socket `is_inherited`, the
    parent process keeps it open after this process has ended: connections that arrive during the
    drain are left to the next process."""
    server = make_server(create_app(gateway), gateway.settings)
    loop = asyncio.get_running_loop()
    helpers = [loop.create_task(work) for work in works]
    serving = loop.create_task(_accept(server, gateway, is_ready, sock))
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait([*helpers, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            server.leave()
            if is_inherited:
                await server.stop_listening(sock)
                sock.close()
            await _drain(gateway, member)
            if not is_inherited:
                await server.stop_listening(sock)
            await server.linger(gateway.settings.linger_ms)
    finally:
        gateway.calls.draining = server.should_exit = True
        stopping.cancel()
        try:
            await asyncio.wait([serving])
        finally:
            await cancel_and_wait(*helpers)
            sock.close()
    for task in [*helpers, serving]:
        if task.done() and not task.cancelled():
            task.result()


async def _accept(
    server: GatewayServer, gateway: Gateway, is_ready: Callable[[], bool], sock: socket.socket
) -> None:
    """Start to serve once calls can be answered, or after `gateway.wait_ms`. Until then, they wait
    in the socket's backlog."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + gateway.settings.wait_ms / 1000
    while not (is_ready() or gateway.calls.draining) and loop.time() < until_s:  # noqa: ASYNC110 - no event
        await asyncio.sleep(_LOOK_S)
    if not gateway.calls.draining:
        await server.serve(sockets=[sock])


async def _drain(gateway: Gateway, member: CallMember) -> None:
    """Reject new calls, and let calls in flight end within the grace. Streams that do not end can
    be resumed at another gateway. Whole answers cannot, so their work is cancelled."""
    gateway.calls.draining = True
    await member.drain()
    await gateway.calls.wait_until_idle(gateway.settings.grace_ms)
    await gateway.calls.cancel_whole_answers()
