"""What people see of a stack whose broker is away, and when it says that it is ready."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from aiokafka.errors import KafkaTimeoutError

from infra.broker.keeper import BrokerKeeper
from infra.stack import launcher
from infra.stack.configuration import Settings
from infra.stack.fleet_watch import FleetWatch
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.stack.readiness import is_served
from infra.stack.statefile import NO_BROKER, ProcessRow, StackFiles, read_state
from schemas.errors import BrokerUnavailable
from schemas.log import patience
from tests.infra.cli.running import trivium
from tests.virtual import virtual
from tests.waiting import until


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A gateway that says no more than this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class StubbornBroker:
    """Dies again and again, and sometimes cannot have its port at once."""

    log_file = "x.log"

    def __init__(self) -> None:
        self.alive = False
        self.spawns: list[bool] = []
        self.refusals = 0

    def runs(self) -> bool:
        return self.alive

    def answers(self) -> bool:
        return True

    def spawn(self, *, same_port: bool = False) -> str:
        self.spawns.append(same_port)
        if self.refusals:
            self.refusals -= 1
            raise BrokerUnavailable("port 9092 is taken")
        self.alive = True
        return "127.0.0.1:9092"


@virtual
async def test_a_broker_is_started_again_at_its_address_however_often_it_dies() -> None:
    """A port that is taken for a while ends nothing (issue 10, 4)."""
    broker = StubbornBroker()
    kept = BrokerKeeper(broker, 10.0)  # type: ignore[arg-type]  # as much of one as is asked
    assert await kept.start() == "127.0.0.1:9092"
    task = asyncio.create_task(kept.keep())
    for number in range(3):
        broker.alive, broker.refusals = False, number
        await until(lambda: broker.alive, seconds=600)
    assert broker.spawns == [False] + [True] * sum(1 + number for number in range(3))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@virtual
async def test_a_broker_that_never_answers_is_told_with_its_log() -> None:
    broker = StubbornBroker()
    broker.answers = lambda: False  # type: ignore[method-assign]  # as long as anybody asks
    with pytest.raises(BrokerUnavailable, match="9092 did not answer within 10 s; see x.log"):
        await BrokerKeeper(broker, 10.0).start()  # type: ignore[arg-type]  # as above


def test_pauses_grow_up_to_a_bound_and_start_anew_after_a_long_life() -> None:
    pauses = patience.Pauses()
    found = [pauses.after(1.0) for _ in range(8)]
    assert found[:3] == [patience.PAUSE_S * 2**n for n in range(3)]
    assert found[-1] == patience.PAUSE_MAX_S
    assert pauses.after(patience.STABLE_S + 1) == patience.PAUSE_S


async def test_a_stack_is_ready_when_its_gateways_know_their_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes are ready, and still a call would be refused (issue 10, 14)."""
    answers, asked = [False, True, True, True], list[str]()

    async def is_served(url: str) -> bool:
        asked.append(url)
        return answers.pop(0)

    urls = ["http://one", "http://two"]
    monkeypatch.setattr(launcher, "is_served", is_served)
    monkeypatch.setattr(Stack, "state_of", lambda self, name: "ready")
    monkeypatch.setattr(Stack, "gateway_urls", urls)
    stack = Stack(Settings(), StackPlan(gateways=2, broker=False), folder=tmp_path)
    await stack.wait_ready("gateway-0", "gateway-1")
    assert asked == urls * 2
    half = Stack(Settings(), StackPlan(decode=0, broker=False), folder=tmp_path)
    await half.wait_ready("gateway-0")  # nobody could serve anything
    assert asked == urls * 2


def test_a_gateway_is_asked_over_http() -> None:
    found = {}
    for status in (503, 200):
        with answering(status) as url:
            found[status] = asyncio.run(is_served(url))
    assert found == {503: False, 200: True}
    assert asyncio.run(is_served("http://127.0.0.1:1")) is False


def test_status_answers_without_a_broker(tmp_path: Path) -> None:
    """What the launcher knows is told (issue 10, 4)."""
    row = ProcessRow(
        name="decode-0", kind="worker", pid=7, state=NO_BROKER, restarts=0, url="", log_file="x.log"
    )
    files = StackFiles(tmp_path)
    files.lock()
    try:
        files.write(bootstrap="127.0.0.1:1", ready=True, gateways=[], processes=[row])
        code, shown, errors = trivium("status", "--once", home=tmp_path)
        assert code == 0, errors
        assert "no broker answers at 127.0.0.1:1" in shown
        assert "decode-0 no broker 7" in " ".join(shown.split())
        _, told, _ = trivium("status", "--json", home=tmp_path)
        assert [(each["member_id"], each["state"]) for each in json.loads(told)] == [
            ("decode-0", NO_BROKER)
        ]
    finally:
        files.release()


async def test_a_start_asks_again_where_a_new_broker_is_too_slow(tmp_path: Path) -> None:
    """A busy machine's broker does not say in time where the fleet's records are (issue 10, 4)."""
    asked: list[str] = []

    class Consumer:
        """Knows the topic, and times out once."""

        async def start(self) -> None:
            """Connected."""

        async def stop(self) -> None:
            """Closed."""

        def assign(self, places: list[Any]) -> None:
            """All of them."""

        async def beginning_offsets(self, places: list[Any]) -> dict[Any, int]:
            asked.append("beginnings")
            if len(asked) == 1:
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

    with patch("schemas.log.clients.AIOKafkaConsumer", lambda **_: Consumer()):
        stack = Stack(Settings(), StackPlan(), folder=tmp_path)
        await stack._insist(FleetWatch(stack.settings.log).start, time.monotonic() + 30)
    assert asked == ["beginnings"] * 2


@virtual
async def test_a_start_waits_for_a_broker_that_comes_later(tmp_path: Path) -> None:
    """And says so meanwhile; one that does not come ends it (issue 10, 4)."""
    stack = Stack(Settings(), StackPlan(broker=False), folder=tmp_path)
    asked, seen = 0, set[str]()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        seen.add(stack.waits_for)
        if asked < 5:
            raise BrokerUnavailable("no broker at k:9092")

    await stack._insist(ask, time.monotonic() + 30)
    assert (asked, seen, stack.waits_for) == (5, {"", "no broker at k:9092"}, "")
    asked = -100
    began_s = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="no broker at k:9092 .asked for 20 s"):
        await stack._insist(ask, began_s + 20)
    assert time.monotonic() - began_s == pytest.approx(20)
    assert stack.waits_for == ""


@pytest.mark.parametrize("detached", [False, True])
def test_up_says_that_it_waits_for_a_cluster(tmp_path: Path, detached: bool) -> None:
    """The line is there while the start goes on trying (issue 10, 4)."""
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
