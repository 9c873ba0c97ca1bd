"""Every command and every setting on a page is one that the real parsers take."""

import argparse
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from infra.cli.app import app
from infra.cli.commands import load_command
from infra.cli.measure.bench import BENCHMARKS, benchmark
from infra.stack.configuration import load
from tests import tidy_pages
from tests.page_blocks import TRIVIUM, Block, blocks, inline_commands

ROOT_COMMAND: Any = typer.main.get_command(app)
PROGRAMS = {TRIVIUM, "make", "git", "cd", "curl", "java", "kcat", "echo"}
TARGETS_OF_BENCHMARKS = {f"bench-{name}": name for name in BENCHMARKS}
TARGETS = TARGETS_OF_BENCHMARKS | {"up": "up", "down": "down", "demo": "demo"}


class Parsed(Exception):
    """Raised instead of running a benchmark, once its command line is read."""


@pytest.fixture(autouse=True)
def _only_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks parse their own command lines; none of them runs after that."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def below(group: Any, name: str) -> Any:
    """The group's command of that name; for the whole program, imported on demand."""
    return load_command(name) if group is ROOT_COMMAND else group.commands[name]


def check(words: list[str]) -> None:
    """Parse a command line of `trivium` as the program does, down to its last option."""
    command, names = ROOT_COMMAND, ["trivium"]
    while hasattr(command, "commands") and (words or not command.invoke_without_command):
        name, *words = words
        assert name in command.commands, f"{' '.join(names)} {name} is no command"
        command, names = below(command, name), [*names, name]
    if names[-1] == "bench":
        name, *rest = words
        with pytest.raises(Parsed):
            benchmark(name).main(rest)
    else:
        command.make_context(" ".join(names), list(words))


def of_make(words: list[str]) -> list[str]:
    """What a target of the Makefile runs, as words of `trivium`; empty for other targets."""
    _, target, *rest = words
    argument_lists = [word.removeprefix("ARGS=").split() for word in rest]
    arguments = [argument for part in argument_lists for argument in part]
    if target == "evaluate":
        return ["evaluate", "ppd", *arguments]
    if target in TARGETS_OF_BENCHMARKS:
        return ["bench", TARGETS_OF_BENCHMARKS[target], *arguments]
    return [TARGETS[target], *arguments] if target in TARGETS else []


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.page)
def test_page_commands_parse(block: Block) -> None:
    for words in block.commands():
        assert words[0] in PROGRAMS, words
        if words[0] == TRIVIUM:
            check(words[1:])
        elif words[0] == "make" and (command_words := of_make(words)):
            check(command_words)


def test_inline_commands_exist() -> None:
    """`trivium pool move` in a sentence need not be complete, but its names exist."""
    for page, text in sorted(inline_commands()):
        command = ROOT_COMMAND
        for word in text.split()[1:]:
            if not hasattr(command, "commands") or not (word.isalpha() and word.islower()):
                break
            assert word in command.commands, f"{page}: {text}: {word} is no command"
            command = below(command, word)


def test_make_commands_in_tables_parse() -> None:
    """`make bench-serving` with `ARGS="--quick"`, wherever a page names both in one cell."""
    for text in tidy_pages.of_today().values():
        for target, arguments in re.findall(r'`make ([\w-]+) ARGS="?([^"`]+)"?`', text):
            if command_words := of_make(["make", target, f"ARGS={arguments}"]):
                check(command_words)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.page)
def test_page_settings_load(block: Block, tmp_path: Path) -> None:
    """Each section and field exists, and each value is valid."""
    file = tmp_path / "trivium.toml"
    file.write_text(block.text)
    assert tomllib.loads(block.text)
    load(file, environ={})


@pytest.mark.parametrize("block", blocks("json", "python"), ids=lambda block: block.page)
def test_page_json_and_python_blocks_parse(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    else:
        compile(block.text, block.page, "exec")
