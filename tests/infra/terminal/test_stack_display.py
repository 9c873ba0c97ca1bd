"""What `trivium up` prints while a stack starts and ends, from states at hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infra.stack.configuration import Settings
from infra.stack.statefile import ProcessRow
from infra.terminal.stack_display import JsonLines, LiveTable, PlainLines
from schemas.settings import ModelSettings


class FakeStack:
    """A stack as displays see it."""

    bootstrap, folder, gateway_urls, ready = "k:9092", Path("/state"), ["http://g:1"], True
    waits_for, usual_s = "", 21.0
    settings = Settings(model=ModelSettings(name="m", tool_parser="hermes"))

    def __init__(self) -> None:
        self.states = {"router-0": "waiting", "gateway-0": "starting"}
        self.models: dict[str, str] = {}

    def rows(self) -> list[ProcessRow]:
        return [
            ProcessRow(
                name=name,
                kind=name[:-2],
                model=self.models.get(name, ""),
                pid=7 if state != "waiting" else 0,
                state=state,
                restarts=0,
                url="",
                log_file="",
            )
            for name, state in self.states.items()
        ]


def run_lifecycle(display: PlainLines, stack: FakeStack) -> None:
    """The stack starts, is ready, drains and ends."""
    display.show()
    display.show()
    stack.states = dict.fromkeys(stack.states, "ready")
    display.ready()
    display.stopping()
    display.stopped()


def test_plain_lines_print_each_change_once_before_readiness(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stack: Any = FakeStack()
    run_lifecycle(PlainLines(stack), stack)
    lines = [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines[4] == "ready: http://g:1/v1 (OpenAI API), http://g:1/docs"
    assert lines[:4] == [
        "gateway-0: starting, pid 7",
        "router-0: ready, pid 7",
        "gateway-0: ready, pid 7",
        "model: m; tool parser: hermes, reasoning parser: auto",
    ]
    assert lines[-1].startswith("stopped")


def test_json_lines_print_process_and_stack_events(capsys: pytest.CaptureFixture[str]) -> None:
    stack: Any = FakeStack()
    run_lifecycle(JsonLines(stack), stack)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["event"], event.get("name")) for event in events] == [
        ("process", "gateway-0"),
        ("process", "router-0"),
        ("process", "gateway-0"),
        ("ready", None),
        ("draining", None),
        ("stopped", None),
    ]
    assert (events[3]["gateways"], events[3]["bootstrap"]) == (["http://g:1"], "k:9092")
    assert (events[3]["model"], events[3]["tool_parser"]) == ("m", "hermes")


def test_displays_show_models_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    stack: Any = FakeStack()
    stack.settings = stack.settings.with_models(
        [ModelSettings(name="m"), ModelSettings(name="[n]")]
    )
    stack.states, stack.models = {"router-0": "ready", "decode-0": "ready"}, {"decode-0": "[n]"}
    PlainLines(stack).ready()
    lines = [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["router-0: ready, pid 7", "decode-0: ready, pid 7, model [n]"]
    assert [line.split(";")[0] for line in lines[2:4]] == ["model: m", "model: [n]"]
    JsonLines(stack).ready()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event.get("model") for event in events] == ["", "[n]", "m"]
    assert events[2]["models"] == ["m", "[n]"]
    with LiveTable(stack, Console(width=120)) as display:
        display.show()
    output = capsys.readouterr().out
    assert "process   model" in output and "decode-0  [n]" in output


def test_live_table_updates_states_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    stack: Any = FakeStack()
    run_lifecycle(LiveTable(stack), stack)
    assert "gateway-0: " not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [PlainLines, JsonLines, LiveTable])
def test_display_prints_start_obstacle_once(
    capsys: pytest.CaptureFixture[str], kind: type[PlainLines]
) -> None:
    stack: Any = FakeStack()
    stack.waits_for, stack.ready = "no broker at [::1]:9092", False
    with (display := kind(stack)):
        for _ in range(2):
            display.show()
        if isinstance(display, LiveTable):
            display._live.update(display._picture(), refresh=True)
    assert capsys.readouterr().out.count("no broker at [::1]:9092") == 1


@pytest.mark.parametrize("kind", [PlainLines, LiveTable])
def test_display_shows_wait_reason_and_usual_start_time(
    capsys: pytest.CaptureFixture[str], kind: type[PlainLines]
) -> None:
    stack: Any = FakeStack()
    stack.waits_for, stack.ready = "the broker starts", False
    with kind(stack) as display:
        display.show()
        stack.waits_for = ""
        display.show()
    output = capsys.readouterr().out
    assert "waiting: the broker starts" in output or kind is LiveTable
    assert output.count("21") == 1
