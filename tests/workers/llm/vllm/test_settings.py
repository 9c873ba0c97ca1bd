"""Settings of the vLLM engine that stop the start, and its further arguments."""

import socket
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.settings import ModelSettings
from workers.llm.vllm.settings import VllmSettings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_transfer": "both"}, "expected one of pull, push, off"),
        ({"keep_decoded_kv_ms": 5_000}, "expected 0 or more than 5000 ms"),
        ({"keep_decoded_kv_ms": 9_000, "kv_transfer": "push"}, "expected 0 where kv_transfer"),
        ({"running_max": 0}, "vllm.running_max: expected at least 1"),
        ({"kv_lease_s": 5, "handle_margin_ms": 5_000}, "expected less than kv_lease_s"),
        ({"extra": "{"}, "expected a JSON object"),
        ({"extra": "[]"}, "expected a JSON object"),
    ],
)
def test_settings_reject_invalid_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmSettings(**fields)


def test_settings_parse_extra_arguments() -> None:
    assert VllmSettings(extra='{"seed": 3}').extra_args() == {"seed": 3}


@pytest.mark.parametrize(
    ("fields", "on_cpu", "elsewhere"),
    [
        ({}, 256, 0),
        ({"step_tokens": 1_024}, 1_024, 1_024),
        ({"step_tokens": 16}, 64, 64),
        ({"running_max": 300}, 300, 0),
    ],
)
def test_settings_shorten_step_on_cpu(fields: dict[str, Any], on_cpu: int, elsewhere: int) -> None:
    """Neither a cancellation nor a new request interrupts a step."""
    settings = VllmSettings(**fields)
    assert settings.step_tokens_max(is_cpu=True) == on_cpu
    assert settings.step_tokens_max(is_cpu=False) == elsewhere


@pytest.mark.vllm
def test_launch_reserves_side_channel_port_until_engine_listens() -> None:
    launcher = import_module("workers.llm.vllm.launch")
    with launcher._side_channel_port(VllmSettings()) as port, socket.socket() as other_socket:
        with pytest.raises(OSError, match="in use"):
            other_socket.bind(("localhost", port))
        with socket.create_server(("localhost", port)):  # allows reuse, as ZeroMQ does
            pass


@pytest.mark.vllm
@pytest.mark.parametrize(("setting", "expected"), [("qwen3", "qwen3"), ("none", ""), ("auto", "")])
def test_launch_tells_vllm_where_reasoning_ends(
    tmp_path: Path, setting: str, expected: str
) -> None:
    """A form must not bind the reasoning before the answer."""
    launcher = import_module("workers.llm.vllm.launch")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    model = ModelSettings(path=str(tmp_path), reasoning_parser=setting)
    args = launcher.engine_args(VllmSettings(), model, "sockets", "engine", has_transfer=False)
    assert args.reasoning_parser == expected
