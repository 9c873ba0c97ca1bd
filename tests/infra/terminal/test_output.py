"""How wide tables are."""

import io

import pytest
from rich.console import Console

from infra.terminal.output import PIPED_COLUMNS, print_indented, stdout_console


def test_console_in_pipe_has_fixed_or_requested_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout_console().width == PIPED_COLUMNS
    monkeypatch.setenv("COLUMNS", "90")
    assert stdout_console().width == 90


def test_print_indented_wraps_or_cuts_at_terminal_width() -> None:
    console = Console(file=io.StringIO(), width=20)
    print_indented(console, " one two three four five six\n", "dim")
    print_indented(console, "one two three four five six", "dim", cut=True)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # as given
    assert [line.rstrip() for line in lines] == [
        "  one two three four",
        "  five six",
        "  one two three fou…",
    ]
