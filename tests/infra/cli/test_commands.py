"""The table of commands: it says what they say of themselves, and names where they are."""

import contextlib
import io
import os
from typing import Any
from unittest.mock import patch

import pytest

from infra.cli.app import app
from infra.cli.commands import COMMANDS, load_command, present_words
from infra.cli.measure.bench import PASS_ON
from infra.cli.measure.simulate import EXAMPLES
from tests.infra.cli.trivium_runner import trivium_here

ALL = {name: line for rows in COMMANDS.values() for name, (_, line) in rows.items()}


@pytest.mark.parametrize("name", ALL)
def test_command_table_line_equals_first_help_paragraph(name: str) -> None:
    assert ALL[name] == load_command(name).help.partition("\n\n")[0]


def test_loaded_command_keeps_typer_options() -> None:
    assert load_command("simulate").epilog == EXAMPLES
    assert load_command("bench").context_settings == PASS_ON
    assert load_command("demo").context_settings == {}


def test_completion_offers_commands_and_options_by_prefix() -> None:
    assert completed("trivium", "s") == ["status", "scale", "schemas", "search", "simulate"]
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
        (["pool", "mve"], "No such command 'mve'. Did you mean 'move'?"),
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


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("worker --role prefill", "run worker --role prefill"),
        ("bridge --id b", "run bridge --id b"),
        ("bridge status --json", "status --bridges --json"),
        ("pool list", "status"),
        ("compare --since 1h", "replay log --shadow --since 1h"),
        ("compare --since 1h --shadow a", "replay log --since 1h --shadow --shadow-id a"),
        ("replay a.avro --live --speed 2", "trace send a.avro --speed 2"),
        ("replay a.avro --predict", "replay a.avro --simulate"),
        ("documents load a.npy -c books", "ingest --vectors a.npy -c books"),
        ("broker reset --yes", "broker stop --erase --yes"),
        ("broker start", "broker start"),
        ("pool move worker --to decode", "pool move worker --to decode"),
    ],
)
def test_former_names_become_present_ones(former: str, present: str) -> None:
    assert present_words(former.split()) == present.split()


def test_former_name_warns_and_works() -> None:
    code, output, errors = trivium_here("schemas", "check")
    assert (code, output) == (0, "every version of every record can be read\n")
    assert errors == "trivium: `schemas check` is now `schemas list --check`\n"
    assert trivium_here("schemas", "list", "--check")[1:] == (output, "")
