"""The gateway process: the FastAPI app, the connection to the log, and the server around them.

`create_app` needs no log and no socket, `run_gateway` puts everything together and drains on
`stop`.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from schemas.codec import Codec
from schemas.errors import ConfigError, Forbidden, TriviumError
from schemas.log.clock import wall_ms
from schemas.records import CancelReason, Endpoint
from schemas.settings import LogSettings, ModelSettings
from streams.gateway.config import GatewaySettings
from streams.gateway.endpoints.generate import AsgiEndpoint, events, generate
from streams.gateway.endpoints.openapi import describe
from streams.gateway.endpoints.routes import make_router
from streams.gateway.http.connections import PatientProtocol
from streams.gateway.http.errors import error_body, from_detail, plain_body, retry_headers
from streams.gateway.http.exchange import send_error
from streams.gateway.http.pages import Pages, allowing, is_question, say_yes
from streams.gateway.http.protocol import bounded
from streams.gateway.ids import new_request_id
from streams.gateway.log.backend import LogBackend
from streams.gateway.metrics import Metrics
from streams.gateway.request.intake import Served
from streams.gateway.request.tokenizer import Tokenizer, model_folder
from streams.gateway.state import Gateway
from streams.gateway.stream.hub import Hub

logger = logging.getLogger(__name__)
BACKLOG = 2_048
OTHER_FILES = 512  # besides connections of clients
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


class FastLane:
    """Straight to the endpoints on the path; everything else goes to FastAPI.

    FastAPI's middleware would wrap every write of every stream. Who may not call is turned away.
    """

    def __init__(self, app: FastAPI, posts: Mapping[str, ASGIApp], pages: Pages) -> None:
        self.fastapi = app
        self._posts = posts
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp | None = None
        if scope["type"] == "http":
            try:
                origin = self._pages.check(scope)
            except Forbidden as error:
                name = (b"x-request-id", new_request_id(wall_ms()).encode())
                await send_error(send, error, [name], 0)
                return
            if origin:
                send = allowing(origin, send)
                if is_question(scope):
                    await say_yes(scope, send)
                    return
            if scope["method"] == "POST":
                app = self._posts.get(scope["path"])
        await (app or self.fastapi)(scope, receive, send)


def create_app(gateway: Gateway) -> FastLane:
    """The app around a gateway. The generating endpoints are plain ASGI, the rest is FastAPI."""
    posts = {
        "/v1/chat/completions": AsgiEndpoint(gateway, "chat", generate(Endpoint.CHAT)),
        "/v1/completions": AsgiEndpoint(gateway, "completion", generate(Endpoint.COMPLETION)),
    }
    app = FastAPI(title="Trivium", version=_version(), description="OpenAI-compatible gateway.")
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # FastAPI's documented way
    app.router.routes += [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route(
            "/v1/requests/{request_id}/events",
            AsgiEndpoint(gateway, "events", events),
            methods=["GET"],
        ),
    ]
    app.include_router(make_router(gateway))
    _handle_errors(app, gateway.settings.retry_after_s)
    return FastLane(app, posts, Pages(gateway.settings))


def _version() -> str:
    try:
        return version("trivium")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


def _handle_errors(app: FastAPI, retry_after_s: int) -> None:
    def respond(status: int, body: bytes, extra: dict[str, str] | None = None) -> Response:
        headers = {k.decode(): v.decode() for k, v in retry_headers(status, retry_after_s)}
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
        status = error.status_code
        message = f"{request.method} {request.url.path}: {error.detail}; see /docs"
        body = plain_body(status, message, _HTTP_CODES.get(status, "http_error"))
        return respond(status, body, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        message = "an error of the gateway; its log has the details"
        return respond(500, plain_body(500, message, "internal_error"))


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: `run_gateway`'s caller decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Look after connections too."""
        now_s = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, PatientProtocol):
                connection.look(now_s)
        return await super().on_tick(counter)


def make_server(app: FastLane, settings: GatewaySettings, *, grace_ms: int = 1_000) -> Server:
    """A server for an app; `serve(sockets=[...])` runs it, `should_exit` ends it."""
    config = uvicorn.Config(
        app,
        http=bounded(settings),  # type: ignore[arg-type]  # it is only called
        timeout_keep_alive=settings.idle_ms / 1000,  # type: ignore[arg-type]  # any number serves
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, grace_ms // 1000),
        ws="none",
        proxy_headers=False,  # nothing here looks at the client's address
    )
    return Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises ConfigError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(
            f"gateway.host, gateway.port: {host}:{port} cannot be bound: {error}; "
            "choose another port"
        ) from error
    found.setblocking(False)
    return found


def allow_files(connections_max: int) -> None:
    """Let the process hold so many connections open, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logger.warning(
            "at most %d files may be open, so there may be fewer connections than "
            "gateway.connections_max=%d; raise the limit (ulimit -n)",
            hard,
            connections_max,
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run_gateway(
    log: LogSettings,
    gateway: GatewaySettings,
    model: ModelSettings,
    *,
    gateway_id: str,
    stop: asyncio.Event,
    codec: Codec | None = None,
) -> None:
    """Serve until `stop`, then drain. Raises what makes going on impossible.

    HTTP is there at once; calls are refused with 503 until the log is joined and workers are ready.
    """
    tokenizer = await asyncio.to_thread(
        lambda: Tokenizer(model_folder(model), inline_chars=gateway.encode_inline_chars)
    )
    served = Served(
        name=model.served_name,
        tokenizer=tokenizer,
        max_model_len=model.max_model_len,
        created_s=wall_ms() // 1000,
    )
    allow_files(gateway.connections_max)
    sock = listen(gateway.host, gateway.port)
    url = "http://{}:{}".format(*sock.getsockname()[:2])
    metrics, started_ms = Metrics(), wall_ms()
    hub = Hub(metrics)
    backend = LogBackend(
        log,
        gateway,
        gateway_id=gateway_id,
        started_ms=started_ms,
        url=url,
        models=frozenset({model.served_name, model.path}),
        hub=hub,
        metrics=metrics,
        codec=codec or Codec(),
    )
    state = Gateway(
        *(gateway, served, backend, hub, metrics), gateway_id=gateway_id, started_ms=started_ms
    )
    backend.turns.heard = state.sessions.learn
    logger.info("%s: serving %s at %s", gateway_id, served.name, url)
    await _serve(state, backend, sock, stop)


async def _serve(
    gateway: Gateway, backend: LogBackend, sock: socket.socket, stop: asyncio.Event
) -> None:
    server = make_server(create_app(gateway), gateway.settings)
    loop = asyncio.get_running_loop()
    helpers = [loop.create_task(backend.run()), loop.create_task(gateway.sweep_forever())]
    serving = loop.create_task(server.serve(sockets=[sock]))
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait([*helpers, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await _drain(gateway, backend)
    finally:
        gateway.draining = server.should_exit = True
        stopping.cancel()
        await asyncio.wait([serving])
        for task in helpers:
            task.cancel()
        await asyncio.wait(helpers)
        sock.close()
    for task in [*helpers, serving]:
        if not task.cancelled():
            task.result()


async def _drain(gateway: Gateway, backend: LogBackend) -> None:
    """Take no more calls and let the present ones end. Streams that do not can be resumed
    elsewhere; whole answers cannot, so their work is cancelled.
    """
    gateway.draining = True
    await backend.drain()
    await gateway.idle(gateway.settings.grace_ms)
    for call in gateway.hub.calls():
        if call.only_end and not call.gone:
            await gateway.cancel(call, CancelReason.CLIENT_GONE)
