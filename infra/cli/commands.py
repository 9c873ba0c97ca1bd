"""Lists the commands of `trivium`: a line of help about each, and its module.

`trivium --help` shows the lines and imports no command. They are the first paragraphs of the
commands' own help (`tests/infra/cli/test_commands.py` compares them).
"""

import inspect
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

MARKUP: Final = "rich"  # of help
COMMANDS = {  # by help panel and name: a function or Typer below infra.cli, and a line of help
    "Deployment": {
        "up": ("operate.up_down:up", "Start a deployment on this machine."),
        "down": ("operate.up_down:down", "Stop the deployment, draining it first."),
        "restart": ("operate.rolling:restart", "Restart its processes under load, one by one."),
        "status": ("operate.status:status", "Show all members, their load and their KV."),
        "scale": ("operate.scale:scale", "Show how many workers are wanted, and why."),
        "pool": ("operate.pools:app", "Move workers between pools and models."),
        "adapters": (
            "operate.adapters:adapters",
            "Show LoRA adapters, and which workers have them.",
        ),
        "run": ("operate.single_process:run", "Run one process in the foreground."),
        "broker": ("log.broker:app", "Start and stop Trivium's own Kafka broker."),
    },
    "Requests": {
        "chat": ("chat:chat", "Talk to the model."),
        "explain": ("log.explain:explain", "Show what happened to a request, and why."),
        "usage": ("log.usage:usage", "Sum up what requests have used."),
    },
    "Topics": {
        "topics": ("log.topics:app", "Show, create and check topics."),
        "tail": ("log.tail:tail", "Print decoded records of a topic."),
        "schemas": ("log.schemas:app", "Register and check schemas of records."),
        "dlq": ("log.dlq:app", "Show dead letters, and send them again."),
    },
    "Retrieval": {
        "ingest": ("retrieve.ingest:ingest", "Add files or vectors to a collection."),
        "search": ("retrieve.search:search", "Search a collection by text or vector."),
        "collections": ("retrieve.collections:app", "Show collections; declare who may search."),
        "index": ("retrieve.index_files:app", "Build, show and check index files."),
    },
    "Traffic": {
        "record": ("log.record:record", "Record what routers did, for a replay."),
        "replay": ("log.replay:replay", "Decide recorded traffic again, or simulate it."),
        "trace": ("measure.traces:app", "Convert, show and send traffic traces."),
        "plan": ("measure.plan_tables:app", "Plan sizes of pools, and policy `table`."),
    },
    "Try and evaluate": {
        "demo": ("measure.bench:demo", "Hold conversations, and explain one."),
        "simulate": ("measure.simulate:simulate", "Run seeds of faults on virtual time."),
        "bench": ("measure.bench:bench", "Run a benchmark by its name."),
        "evaluate": ("measure.evaluate:app", "Repeat published evaluations."),
        "version": ("about:version", "Show versions of Trivium and its parts."),
    },
}
_PLACES = {name: place for rows in COMMANDS.values() for name, (place, _) in rows.items()}
_FORMER = {  # former names, which help does not list: the first words, or options after them
    **{kind: f"run {kind}" for kind in "worker router gateway retrieval embedding".split()},
    "bridge status": "status --bridges",
    "bridge": "run bridge",
    "pool list": "status",
    "compare --shadow": "replay log --shadow --shadow-id",
    "compare": "replay log --shadow",
    "replay --live": "trace send",
    "replay --predict": "replay --simulate",
    "asyncapi": "topics asyncapi",
    "topics verify": "topics describe --check",
    "schemas check": "schemas list --check",
    "dlq show": "dlq list",
    "broker reset": "broker stop --erase",
    "documents load": "ingest --vectors",
    "index verify": "index info --verify",
    "plan probe": "plan ppd --probe",
}
_TYPER_OPTIONS = {  # options of typer by command: a keyword, and its value's name in the module
    "bench": ("context_settings", "PASS_ON"),
    "simulate": ("epilog", "EXAMPLES"),
}


def present_words(args: Sequence[str]) -> list[str]:
    """Return a command line with present names in place of former ones."""
    former = _former(args)
    if former is None:
        return list(args)
    words, present = former.split(), _FORMER[former].split()
    if not words[-1].startswith("--"):
        return [*present, *args[len(words) :]]
    options = [word for word in present if word.startswith("--")]
    at = args.index(words[-1])
    return [*present[: len(present) - len(options)], *args[1:at], *options, *args[at + 1 :]]


def _former(args: Sequence[str]) -> str | None:
    """Return the former name that a command line begins with, if any."""
    for former in _FORMER:
        *names, last = former.split()
        if last.startswith("--") and [*args[:1]] == names and last in args:
            return former
        if [*args[: len(names) + 1]] == [*names, last]:
            return former
    return None


class CommandsOnUse(TyperGroup):
    """A group whose commands are placeholders, until one of them is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as usual, with fewer imports; warn about former names."""
        _flags_are_off(self, ctx)
        if (former := _former(args)) is not None:
            print(f"trivium: `{former}` is now `{_FORMER[former]}`", file=sys.stderr)
            args = present_words(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the arguments name; fail as usual where there is none."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        if placeholder is None:
            return name, None, rest
        command = load_command(placeholder.name or "")
        _flags_are_off(command, ctx)
        return name, command, rest


def _flags_are_off(command: Any, ctx: Any) -> None:
    """Set the default of flags such as `--help` to False instead of None.

    typer reads values with pydantic, whose import takes longer than most answers.
    """
    for option in command.get_params(ctx):
        is_flag = getattr(option, "is_bool_flag", False) and not option.secondary_opts
        if is_flag and option.default is None:
            option.default = False


def add_to(app: typer.Typer) -> None:
    """Add a placeholder for each command, for help and completion."""
    for panel, rows in COMMANDS.items():
        for name, (_, line) in rows.items():
            app.command(name, help=line, rich_help_panel=panel)(_placeholder)


def _placeholder() -> None:
    raise AssertionError("its group puts the real command into its place")


@cache
def load_command(name: str) -> Any:
    """Import a command, ready to parse and run."""
    place, _, attribute = _PLACES[name].partition(":")
    module = import_module(f"infra.cli.{place}")
    target = getattr(module, attribute)
    alone = typer.Typer(rich_markup_mode=MARKUP, pretty_exceptions_enable=False)
    if isinstance(target, typer.Typer):
        alone.add_typer(target, name=name)
    else:
        options = [_TYPER_OPTIONS[name]] if name in _TYPER_OPTIONS else []
        alone.command(name, **{key: getattr(module, value) for key, value in options})(target)
    _unwrap(alone)
    return get_group(alone).commands[name]


def _unwrap(group: typer.Typer) -> None:
    """Join the lines of help paragraphs: typer keeps the line breaks of the source."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _unwrap(inner.typer_instance)
