"""How a gateway serves, as far as no connection is needed to see it."""

import asyncio
import resource
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.settings import LogSettings, ModelSettings
from streams.gateway import app
from streams.gateway.app import create_app
from streams.gateway.config import GatewaySettings
from streams.gateway.http.server import OTHER_FILES, allow_files, make_server
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.small_tokenizer import tokenizer_folder


async def test_a_closing_connection_is_not_waited_for_without_end() -> None:
    """What is unsent to a client that does not read kept its socket."""
    limits, ended = InProcessGateway(write_ms=1_000).state.settings, list[str]()

    class Transport:
        def get_extra_info(self, name: str) -> None:
            """None of it is known."""

        def is_closing(self) -> bool:
            return True

        def write(self, data: bytes) -> None:
            """Nobody reads it."""

        def abort(self) -> None:
            ended.append("aborted")

    server = make_server(create_app(InProcessGateway().state), limits)
    server.config.load()
    made: Any = server.config.http_protocol_class
    connection = made(config=server.config, server_state=server.server_state, app_state={})
    connection.connection_made(Transport())
    for now_s in (100.0, 101.0):
        connection.end_if_late(now_s)
    assert ended == []
    connection.end_if_late(101.1)
    assert ended == ["aborted"]


async def test_a_gateway_allows_itself_the_files_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allow(connections_max: int) -> None:
        raise ConfigError(f"asked for {connections_max}")

    monkeypatch.setattr(app, "allow_files", allow)
    with pytest.raises(ConfigError, match="asked for 77"):
        await app.run_gateway(
            LogSettings(),
            GatewaySettings(port=0, connections_max=77),
            ModelSettings(path=str(tokenizer_folder())),
            gateway_id="gateway-a",
            stop=asyncio.Event(),
        )


def test_the_process_may_open_as_many_files_as_there_may_be_connections() -> None:
    """Or as many as the system allows; a bound that the system undercuts is none."""
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
