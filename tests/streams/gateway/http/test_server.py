"""How a gateway serves, as far as no connection is needed to see it."""

import asyncio
import resource
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.gateway import app
from streams.gateway.app import create_app
from streams.gateway.http.server import OTHER_FILES, allow_files, make_server
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.small_tokenizer import tokenizer_folder


async def test_closing_connection_is_aborted_after_write_timeout() -> None:
    """Unsent data for a client that does not read would keep its socket open."""
    limits, aborts = InProcessGateway(write_ms=1_000).state.settings, list[str]()

    class Transport:
        def get_extra_info(self, name: str) -> None:
            """None of it is known."""

        def is_closing(self) -> bool:
            return True

        def write(self, data: bytes) -> None:
            """Nobody reads it."""

        def abort(self) -> None:
            aborts.append("aborted")

    server = make_server(create_app(InProcessGateway().state), limits)
    server.config.load()
    protocol_class: Any = server.config.http_protocol_class
    connection = protocol_class(
        config=server.config, server_state=server.server_state, app_state={}
    )
    connection.connection_made(Transport())
    for now_s in (100.0, 101.0):
        connection.end_if_late(now_s)
    assert aborts == []
    connection.end_if_late(101.1)
    assert aborts == ["aborted"]


async def test_gateway_raises_file_limit_before_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allow(connections_max: int) -> None:
        raise ConfigError(f"asked for {connections_max}")

    monkeypatch.setattr(app, "allow_files", allow)
    with pytest.raises(ConfigError, match="asked for 77"):
        await app.run_gateway(
            LogSettings(),
            GatewaySettings(port=0, connections_max=77),
            [ModelSettings(path=str(tokenizer_folder()))],
            gateway_id="gateway-a",
            stop=asyncio.Event(),
        )


def test_allow_files_raises_soft_limit_for_connections() -> None:
    """It raises the limit as far as the system allows, and never lowers it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
        allow_files(1_000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft >= 1_000 + OTHER_FILES or soft == hard
        allow_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft, "never fewer"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
