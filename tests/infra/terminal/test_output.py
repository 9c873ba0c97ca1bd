"""How wide tables are."""

import io

import pytest

from infra.terminal.output import PIPED_COLUMNS, stdout_console


def test_tables_in_a_pipe_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout_console().width == PIPED_COLUMNS
    monkeypatch.setenv("COLUMNS", "90")
    assert stdout_console().width == 90
