"""The HTTP server of an app: uvicorn with limits on connections and files.

`app.py` has the process around it.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator

from starlette.types import ASGIApp

from streams.calls.config import GatewaySettings
from streams.gateway.http import library
from streams.gateway.http.head_limits import connection_factory
from streams.gateway.http.listener import BACKLOG
from streams.gateway.http.slow_clients import PatientProtocol

logger = logging.getLogger(__name__)
_LOOK_S = 0.1
OTHER_FILES = 512  # files besides connections of clients


class GatewayServer(library.Server):
    """Uvicorn without its signal handlers: the caller of `run_gateway` decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    is_leaving = False

    async def on_tick(self, counter: int) -> bool:
        """End slow connections in addition to uvicorn's work."""
        now_s = asyncio.get_running_loop().time()
        for connection in self._connections():
            connection.end_if_late(now_s)
        should_exit = await super().on_tick(counter)
        if self.is_leaving:
            self.leave()  # uvicorn has replaced its headers
        return should_exit

    def leave(self) -> None:
        """Make each further answer the last one of its connection, with `connection: close`."""
        self.is_leaving = True
        self.server_state.default_headers = [(b"connection", b"close")]

    async def stop_listening(self, listener: socket.socket) -> None:
        """Accept no new connections, but serve those that clients have already made.

        Connections that wait to be accepted are reset when the last descriptor of their listener is
        closed, and their clients cannot know whether a call was read.
        """
        if not self.started:
            return
        loop, waiting = asyncio.get_running_loop(), list[socket.socket]()
        with listener.dup() as last, contextlib.suppress(OSError):  # BlockingIOError: none is left
            for server in self.servers:
                server.close()
            while True:
                waiting.append(last.accept()[0])
        for accepted in waiting:
            await loop.connect_accepted_socket(self._connection, accepted)

    def _connection(self) -> asyncio.Protocol:
        protocol_class = self.config.http_protocol_class
        return protocol_class(self.config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]  # as uvicorn's

    async def linger(self, limit_ms: int) -> None:
        """Wait until no client is likely to reuse a connection; call `leave` before.

        If a connection is closed at the moment of a request, its client gets no answer at all.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_ms / 1000
        while True:
            now_s = loop.time()
            if now_s >= end_s or not any(
                connection.may_be_reused(now_s) for connection in self._connections()
            ):
                return
            await asyncio.sleep(_LOOK_S)

    def _connections(self) -> list[PatientProtocol]:
        connections = self.server_state.connections
        return [connection for connection in connections if isinstance(connection, PatientProtocol)]


def make_server(app: ASGIApp, settings: GatewaySettings, *, grace_ms: int = 1_000) -> GatewayServer:
    """Return a server of an app; `serve(sockets=[...])` runs it, `should_exit` ends it."""
    config = library.Config(
        app,
        http=connection_factory(settings),  # type: ignore[arg-type]  # it is only called
        timeout_keep_alive=settings.idle_ms / 1000,  # type: ignore[arg-type]  # any number serves
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, grace_ms // 1000),
        ws="none",
        proxy_headers=False,  # no endpoint uses the client's address
    )
    return GatewayServer(config)


def allow_files(connections_max: int) -> None:
    """Raise the process's limit of open files to `connections_max` connections, if the system
    allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_max = connections_max + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < files_max:
        logger.warning(
            "at most %d files may be open, so there may be fewer connections than "
            "gateway.connections_max=%d; raise the limit (ulimit -n)",
            hard,
            connections_max,
        )
        files_max = hard
    if soft != resource.RLIM_INFINITY and soft < files_max:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard))
