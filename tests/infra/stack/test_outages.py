"""What people see of a stack whose broker is away, and when it says that it is ready."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from aiokafka.errors import KafkaTimeoutError

from infra.stack import launcher
from infra.stack.configuration import Settings
from infra.stack.fleet_watch import FleetWatch
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.stack.statefile import NO_BROKER, ProcessRow, StackFiles, StackState, read_state
from schemas.errors import BrokerUnavailable
from streams.log import retry
from tests.infra.cli.trivium_runner import trivium
from tests.virtual_time import virtual


def test_backoff_doubles_to_maximum_and_resets_after_stable_run() -> None:
    pauses = retry.Backoff()
    waits_s = [pauses.after(1.0) for _ in range(8)]
    assert waits_s[:3] == [retry.PAUSE_S * 2**n for n in range(3)]
    assert waits_s[-1] == retry.PAUSE_MAX_S
    assert pauses.after(retry.STABLE_S + 1) == retry.PAUSE_S


async def test_stack_waits_for_gateways_that_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes are ready, and still a call would be refused."""
    answers, probed_urls = [False, True, True, True], list[str]()

    async def is_served(url: str) -> bool:
        probed_urls.append(url)
        return answers.pop(0)

    urls = ["http://one", "http://two"]
    monkeypatch.setattr(launcher, "is_served", is_served)
    monkeypatch.setattr(Stack, "state_of", lambda self, name: "ready")
    monkeypatch.setattr(Stack, "gateway_urls", urls)
    stack = Stack(Settings(), StackPlan(gateways=2, broker=False), folder=tmp_path)
    await stack.wait_ready("gateway-0", "gateway-1")
    assert probed_urls == urls * 2
    half = Stack(Settings(), StackPlan(decode=0, broker=False), folder=tmp_path)
    await half.wait_ready("gateway-0")  # nobody could serve anything
    assert probed_urls == urls * 2


def test_status_command_answers_without_broker(tmp_path: Path) -> None:
    """It shows what the launcher knows."""
    row = ProcessRow(
        name="decode-0", kind="worker", pid=7, state=NO_BROKER, restarts=0, url="", log_file="x.log"
    )
    files = StackFiles(tmp_path)
    files.lock()
    try:
        state = StackState(bootstrap="127.0.0.1:1", ready=True, gateways=[], processes=[row])
        files.write(state)
        code, output, errors = trivium("status", "--once", home=tmp_path)
        assert code == 0, errors
        assert "no broker answers at 127.0.0.1:1" in output
        assert "decode-0 no broker 7" in " ".join(output.split())
        _, status_json, _ = trivium("status", "--json", home=tmp_path)
        assert [(member["member_id"], member["state"]) for member in json.loads(status_json)] == [
            ("decode-0", NO_BROKER)
        ]
    finally:
        files.release()


async def test_stack_start_retries_after_slow_broker(tmp_path: Path) -> None:
    """A busy machine's broker does not answer in time where the fleet's records are."""
    calls: list[str] = []

    class Consumer:
        """Knows the topic, and times out once."""

        _client = SimpleNamespace(send=None)  # never asked
        _fetcher = SimpleNamespace(fetched_records=None, _subscriptions=None)

        async def start(self) -> None:
            """Connected."""

        async def stop(self) -> None:
            """Closed."""

        def assign(self, places: list[Any]) -> None:
            """All of them."""

        async def beginning_offsets(self, places: list[Any]) -> dict[Any, int]:
            calls.append("beginnings")
            if len(calls) == 1:
                raise KafkaTimeoutError("too slow")
            return dict.fromkeys(places, 0)

        async def topics(self) -> set[str]:
            return {"fleet"}

        def seek(self, place: Any, offset: int) -> None:
            """Stands there."""

        def resume(self, place: Any) -> None:
            """Reads on."""

        async def end_offsets(self, places: list[Any]) -> dict[Any, int]:
            return dict.fromkeys(places, 0)

        async def position(self, place: Any) -> int:
            return 0

    with patch("streams.log.clients.AIOKafkaConsumer", lambda **_: Consumer()):
        stack = Stack(Settings(), StackPlan(), folder=tmp_path)
        await stack._retry_until(FleetWatch(stack.settings.log).start, time.monotonic() + 30)
    assert calls == ["beginnings"] * 2


@virtual
async def test_stack_start_waits_for_late_broker(tmp_path: Path) -> None:
    """It says so meanwhile, and fails at its deadline."""
    stack = Stack(Settings(), StackPlan(broker=False), folder=tmp_path)
    attempts, waiting_texts = 0, set[str]()

    async def ask() -> None:
        nonlocal attempts
        attempts += 1
        waiting_texts.add(stack.waits_for)
        if attempts < 5:
            raise BrokerUnavailable("no broker at k:9092")

    await stack._retry_until(ask, time.monotonic() + 30)
    assert (attempts, waiting_texts, stack.waits_for) == (5, {"", "no broker at k:9092"}, "")
    attempts = -100
    began_s = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="no broker at k:9092 .asked for 20 s"):
        await stack._retry_until(ask, began_s + 20)
    assert time.monotonic() - began_s == pytest.approx(20)
    assert stack.waits_for == ""


@pytest.mark.parametrize("detached", [False, True])
def test_up_command_prints_wait_for_broker(tmp_path: Path, detached: bool) -> None:
    """The line appears while the start still retries."""
    command = [sys.executable, "-m", "infra.cli.app", "up", "--engine", "sim"]
    command += ["--bootstrap", "127.0.0.1:1", *["-d"] * detached]
    env = os.environ | {"TRIVIUM_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as up:
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            state = read_state(tmp_path)
        finally:
            assert trivium("down", home=tmp_path)[1] == "stopped\n"
        rest = up.stdout.read()
    assert "waiting: no broker at 127.0.0.1:1" in line
    assert state is not None and state.waits_for in line
    assert detached or "stopped; nothing of it runs" in rest
    assert read_state(tmp_path) is None
