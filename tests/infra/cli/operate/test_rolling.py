"""`trivium restart` says what came back when, and what is not there."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.stack import rolling
from tests.infra.cli.trivium_runner import trivium_here


async def restarted(
    names: Sequence[str], *, on_restart: Callable[[str, float], None], **_: Any
) -> None:
    for name in names or ("router-0", "gateway-0"):
        on_restart(name, 4.25)


def test_restart_command_reports_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "restart", restarted)
    code, output, _ = trivium_here("restart", "gateway-1")
    assert (code, output) == (0, "gateway-1 is ready again, after 4.2 s\n")
    code, output, _ = trivium_here("restart", "--json")
    assert (code, json.loads(output)) == (0, {"router-0": 4.2, "gateway-0": 4.2})


def test_restart_command_fails_without_running_stack(tmp_path: Path) -> None:
    code, _, errors = trivium_here("restart", home=tmp_path)
    assert code == 2
    assert f"nothing runs in {tmp_path}; start it with `trivium up`" in errors
