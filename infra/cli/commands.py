"""Lists the commands of `trivium`: a line of help about each, and its module.

`trivium --help` shows the lines and imports no command. They are the first paragraphs of the
commands' own help (`tests/infra/cli/test_commands.py` compares them).
"""

import inspect
from functools import cache
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

MARKUP: Final = "rich"  # of help
LINES = {  # by help panel and name, in the order of the help
    "Run": {
        "up": "Start broker, routers, workers, gateways and bridges; Ctrl-C drains and stops them.",
        "down": "Stop the stack that runs in this state folder, draining it first.",
        "restart": "Restart processes of `trivium up` one after the other, under load.",
        "status": (
            "Show workers, routers, gateways and bridges: states, credits, queues, tokens per "
            "second, KV."
        ),
        "scale": (
            "Show how many prefill, decode, replica and retrieval workers are wanted, and why."
        ),
        "chat": "Talk to the model; each answer says where it was computed. An empty line ends.",
        "search": "Find passages for a text, or the documents nearest to a vector, in all shards.",
        "ingest": "Ingest text, Markdown, HTML, PDF, office files, tables, JSON and source code.",
        "demo": (
            "Hold conversations through Kafka, real engines and NIXL, look answers up, and "
            "explain one."
        ),
        "bench": "Run a benchmark; what follows its name goes to it. Results lie in build/bench.",
        "simulate": (
            "The real router, gateways and workers on virtual time, while everything breaks."
        ),
        "pool": "Show the pools of workers, and move workers between them without a restart.",
        "evaluate": "Published evaluations, on simulated or live engines.",
        "plan": "Tables that policies look up, and how many workers pools want.",
        "trace": "Traffic traces: converted, shown, and sent to a running cluster.",
    },
    "Log": {
        "tail": "Print decoded records of a topic.",
        "explain": (
            "Tell a request's whole story: decisions and why, dispatches, KV transfers, tokens, "
            "outcome."
        ),
        "usage": "Sum what requests have used, by tenant, model, class or hour.",
        "record": (
            "Record what routers did: requests, all else that they applied, decisions, outcomes, "
            "usage."
        ),
        "replay": (
            "Replay recorded traffic: decide it again, or simulate it with other settings and "
            "faults."
        ),
        "asyncapi": "Print the AsyncAPI document of all topics and records, or write it as a page.",
        "documents": "Load documents with ready vectors.",
        "collections": "Show collections, and declare who may search them.",
        "broker": "Apache Kafka as one node of Trivium's own, with its data in the state folder.",
        "topics": "Say what topics are for; create them, check them, show them as they are.",
        "schemas": "Register the schemas of all records, check them, list them.",
        "dlq": (
            "Dead letters: records that nobody could read or answer. Look at them, send them again."
        ),
    },
    "Single processes": {
        "worker": "Run one worker.",
        "retrieval": (
            "Run one retrieval worker: a shard of all collections, searched for prefill and decode."
        ),
        "embedding": (
            "Run one embedding worker: it cuts documents into passages and makes vectors, of "
            "searches too."
        ),
        "router": "Run one router; several share the sessions among them.",
        "gateway": "Run one gateway: the OpenAI API over HTTP.",
        "bridge": (
            "Run one bridge: prompts from topics, one answer each, to topics. Several share "
            "partitions."
        ),
    },
    "About": {
        "version": "Versions of Trivium and of what decides its behaviour.",
    },
    "Files": {
        "index": "Build, look at and check index files.",
    },
}
_PLACES = {  # below infra.cli: a function, or a group as a Typer
    "up": "operate.up_down:up",
    "down": "operate.up_down:down",
    "restart": "operate.rolling:restart",
    "status": "operate.status:status",
    "scale": "operate.scale:scale",
    "chat": "chat:chat",
    "search": "retrieve.search:search",
    "ingest": "retrieve.ingest:ingest",
    "demo": "measure.bench:demo",
    "bench": "measure.bench:bench",
    "simulate": "measure.simulate:simulate",
    "pool": "operate.pools:app",
    "evaluate": "measure.evaluate:app",
    "plan": "measure.plan_tables:app",
    "trace": "measure.traces:app",
    "tail": "log.tail:tail",
    "explain": "log.explain:explain",
    "usage": "log.usage:usage",
    "record": "log.record:record",
    "replay": "log.replay:replay",
    "asyncapi": "about:asyncapi",
    "documents": "retrieve.documents:app",
    "collections": "retrieve.collections:app",
    "broker": "log.broker:app",
    "topics": "log.topics:app",
    "schemas": "log.schemas:app",
    "dlq": "log.dlq:app",
    "worker": "operate.single_process:worker",
    "retrieval": "operate.single_process:retrieval",
    "embedding": "operate.single_process:embedding",
    "router": "operate.single_process:router",
    "gateway": "operate.single_process:gateway",
    "bridge": "operate.bridges:app",
    "version": "about:version",
    "index": "retrieve.index_files:app",
}
_TYPER_OPTIONS = {  # options of typer by command: a keyword, and its value's name in the module
    "bench": ("context_settings", "PASS_ON"),
    "simulate": ("epilog", "EXAMPLES"),
}


class CommandsOnUse(TyperGroup):
    """A group whose commands are placeholders, until one of them is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as usual, with fewer imports."""
        _flags_are_off(self, ctx)
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
    for panel, lines in LINES.items():
        for name, line in lines.items():
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
