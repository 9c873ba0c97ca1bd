"""Settings of a gateway that stop its start."""

from typing import Any

import pytest

from schemas.errors import ConfigError
from streams.calls.config import GatewaySettings


def test_gateway_settings_reject_priority_above_cap() -> None:
    with pytest.raises(ConfigError, match="priority: expected at most priority_max=batch"):
        GatewaySettings(priority_max="batch")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70_000}, "gateway.port: expected at most 65535, found 70000"),
        ({"in_flight_max": 0}, "gateway.in_flight_max: expected at least 1, found 0"),
        ({"prompt_tokens_max": -1}, "gateway.prompt_tokens_max: expected at least 0, found -1"),
        ({"context_template": "{question}"}, "expected {passages} and then {question} in it"),
        ({"deadline_ms": 4_000_000}, "gateway.deadline_ms: expected at most deadline_ms_max"),
        ({"deadline_ms_max": 86_400_000}, "deadline_ms_max: expected at most 82800000, while the"),
        ({"include_usage": "never"}, "gateway.include_usage: expected one of asked, always"),
        ({"priority": "urgent"}, "gateway.priority: expected one of standard, interactive, batch"),
        ({"api_keys": ("a", " ")}, "gateway.api_keys: expected keys, found an empty one"),
        (
            {"api_keys": ('["a"', '"b"]')},
            "api_keys: expected keys without commas, quotes",
        ),
    ],
)
def test_gateway_settings_reject_invalid_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewaySettings(**changes)
