"""The table of commands: it says what they say of themselves, and names where they are."""

import contextlib
import io
import os
from typing import Any
from unittest.mock import patch

import pytest

from infra.cli.app import app
from infra.cli.commands import LINES, load_command
from infra.cli.measure.bench import PASS_ON
from infra.cli.measure.simulate import EXAMPLES
from tests.infra.cli.trivium_runner import trivium_here

ALL = {name: line for lines in LINES.values() for name, line in lines.items()}


@pytest.mark.parametrize("name", ALL)
def test_command_table_line_equals_first_help_paragraph(name: str) -> None:
    assert ALL[name] == load_command(name).help.partition("\n\n")[0]


def test_loaded_command_keeps_typer_options() -> None:
    assert load_command("simulate").epilog == EXAMPLES
    assert load_command("bench").context_settings == PASS_ON
    assert load_command("demo").context_settings == {}


def test_completion_offers_commands_and_options_by_prefix() -> None:
    assert completed("trivium", "s") == ["status", "scale", "search", "simulate", "schemas"]
    assert completed("trivium", "pool", "m") == ["move"]
    assert completed("trivium", "down", "--q") == ["--quiet"]


def completed(*words: str) -> list[str]:
    """The words that a shell is offered for the last word."""
    line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    output = io.StringIO()
    with (
        patch.dict(os.environ, {"_TRIVIUM_COMPLETE": "complete_bash", **line}),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        app(prog_name="trivium")
    return output.getvalue().split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stauts"], "No such command 'stauts'. Did you mean 'status', 'restart'?"),
        (["pool", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["--bogus"], "No such option: --bogus"),
        (["status", "--bogus"], "No such option: --bogus"),
    ],
)
def test_cli_suggests_command_for_misspelling(arguments: list[str], message: str) -> None:
    code, _, errors = trivium_here(*arguments)
    assert (code, message in errors) == (2, True)


def test_flags_default_to_off() -> None:
    """This includes commands whose own parser reads the flags."""
    group: Any = load_command("pool")
    assert not any(option.default for option in group.params)
    code, output, _ = trivium_here("bench", "--help")
    assert (code, "takeover" in output) == (0, True)
