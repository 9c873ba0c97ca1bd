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
COMMANDS = {  # by help panel and name: a line, and a function or Typer below infra.cli
    "Deployment": {
        "up": (
            "Start broker, routers, workers, gateways and bridges; Ctrl-C drains and stops them.",
            "operate.up_down:up",
        ),
        "down": (
            "Stop the stack that runs in this state folder, draining it first.",
            "operate.up_down:down",
        ),
        "restart": (
            "Restart processes of `trivium up` one after the other, under load.",
            "operate.rolling:restart",
        ),
        "status": (
            "Show workers, routers, gateways and bridges: states, credits, queues, tokens per "
            "second, KV.",
            "operate.status:status",
        ),
        "scale": (
            "Show how many prefill, decode, replica and retrieval workers are wanted, and why.",
            "operate.scale:scale",
        ),
        "pool": ("Move workers between pools without a restart.", "operate.pools:app"),
        "run": (
            "Run one process in the foreground: a worker, router, gateway, bridge, or one of "
            "retrieval.",
            "operate.single_process:run",
        ),
        "broker": (
            "Start and stop Trivium's own Kafka broker, with its data in the state folder.",
            "log.broker:app",
        ),
    },
    "Requests": {
        "chat": (
            "Talk to the model; each answer says where it was computed. An empty line ends.",
            "chat:chat",
        ),
        "explain": (
            "Show what happened to a request: decisions and why, KV transfers, tokens, outcome.",
            "log.explain:explain",
        ),
        "usage": (
            "Sum what requests have used, by tenant, model, class or hour.",
            "log.usage:usage",
        ),
    },
    "Topics": {
        "topics": (
            "Show what topics are for and their state on a cluster; create and check them.",
            "log.topics:app",
        ),
        "tail": ("Print decoded records of a topic.", "log.tail:tail"),
        "schemas": (
            "Register the schemas of all records, check them, list them.",
            "log.schemas:app",
        ),
        "dlq": (
            "Show dead letters, records that could not be read or answered; send them again.",
            "log.dlq:app",
        ),
    },
    "Retrieval": {
        "ingest": (
            "Ingest text, Markdown, HTML, PDF, office files, tables, JSON and source code.",
            "retrieve.ingest:ingest",
        ),
        "search": (
            "Find passages for a text, or the documents nearest to a vector, in all shards.",
            "retrieve.search:search",
        ),
        "collections": (
            "Show collections, and declare who may search them.",
            "retrieve.collections:app",
        ),
        "index": ("Build index files, show and check them.", "retrieve.index_files:app"),
    },
    "Traffic": {
        "record": (
            "Record what routers did: requests, all else that they applied, decisions, outcomes, "
            "usage.",
            "log.record:record",
        ),
        "replay": (
            "Replay recorded traffic: decide it again, or simulate it with other settings and "
            "faults.",
            "log.replay:replay",
        ),
        "trace": (
            "Convert and show traffic traces, and send them to a running cluster.",
            "measure.traces:app",
        ),
        "plan": (
            "Plan how many workers pools need, and measure the table of the policy `table`.",
            "measure.plan_tables:app",
        ),
    },
    "Try and evaluate": {
        "demo": (
            "Hold conversations through Kafka, real engines and NIXL, look answers up, and "
            "explain one.",
            "measure.bench:demo",
        ),
        "simulate": (
            "Run the real router, gateways and workers on virtual time, with faults of all kinds.",
            "measure.simulate:simulate",
        ),
        "bench": (
            "Run a benchmark; the options after its name go to it. Results are in build/bench.",
            "measure.bench:bench",
        ),
        "evaluate": (
            "Published evaluations, on simulated or live engines.",
            "measure.evaluate:app",
        ),
        "version": (
            "Show the versions of Trivium and of the packages that decide its behaviour.",
            "about:version",
        ),
    },
}
_PLACES = {name: place for rows in COMMANDS.values() for name, (_, place) in rows.items()}
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
        for name, (line, _) in rows.items():
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
