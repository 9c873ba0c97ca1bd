"""The `trivium` command: names the commands, hands each to its file, turns errors into one line.

Commands import what they need when they run, so that `trivium --help` stays quick.
"""

import inspect
import logging
import os
import sys

import typer

from infra.cli import about, chat
from infra.cli.log import (
    broker,
    compare,
    dlq,
    explain,
    record,
    replay,
    schemas,
    tail,
    topics,
    usage,
)
from infra.cli.measure import bench, evaluate, plan_tables, simulate, traces
from infra.cli.operate import bridges, pools, rolling, scale, single_process, status, up_down
from infra.cli.retrieve import collections, documents, index_files, ingest, search
from schemas.errors import TriviumError

EXIT_ERROR = 2

app = typer.Typer(
    name="trivium",
    help="Serves language models as prefill and decode workers that meet on a Kafka log.",
    epilog="Errors are one line; `--debug` anywhere shows where they came from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up", rich_help_panel="Run")(up_down.up)
app.command("down", rich_help_panel="Run")(up_down.down)
app.command("restart", rich_help_panel="Run")(rolling.restart)
app.command("status", rich_help_panel="Run")(status.status)
app.command("scale", rich_help_panel="Run")(scale.scale)
app.command("chat", rich_help_panel="Run")(chat.chat)
app.add_typer(pools.app, name="pool", rich_help_panel="Run")
app.command("search", rich_help_panel="Run")(search.search)
app.command("ingest", rich_help_panel="Run")(ingest.ingest)
app.command("demo", rich_help_panel="Run")(bench.demo)
app.command("bench", rich_help_panel="Run", context_settings=bench.PASS_ON)(bench.bench)
app.add_typer(evaluate.app, name="evaluate", rich_help_panel="Run")
app.command("simulate", rich_help_panel="Run", epilog=simulate.EXAMPLES)(simulate.simulate)
app.add_typer(plan_tables.app, name="plan", rich_help_panel="Run")
app.add_typer(traces.app, name="trace", rich_help_panel="Run")
app.add_typer(documents.app, name="documents", rich_help_panel="Log")
app.add_typer(collections.app, name="collections", rich_help_panel="Log")
app.add_typer(broker.app, name="broker", rich_help_panel="Log")
app.add_typer(topics.app, name="topics", rich_help_panel="Log")
app.add_typer(schemas.app, name="schemas", rich_help_panel="Log")
app.add_typer(dlq.app, name="dlq", rich_help_panel="Log")
app.command("tail", rich_help_panel="Log")(tail.tail)
app.command("explain", rich_help_panel="Log")(explain.explain)
app.command("usage", rich_help_panel="Log")(usage.usage)
app.command("record", rich_help_panel="Log")(record.record)
app.command("replay", rich_help_panel="Log")(replay.replay)
app.command("compare", rich_help_panel="Log")(compare.compare)
app.command("asyncapi", rich_help_panel="Log")(about.asyncapi)
app.add_typer(index_files.app, name="index", rich_help_panel="Files")
app.command("worker", rich_help_panel="Single processes")(single_process.worker)
app.command("retrieval", rich_help_panel="Single processes")(single_process.retrieval)
app.command("embedding", rich_help_panel="Single processes")(single_process.embedding)
app.command("router", rich_help_panel="Single processes")(single_process.router)
app.command("gateway", rich_help_panel="Single processes")(single_process.gateway)
app.add_typer(bridges.app, name="bridge", rich_help_panel="Single processes")
app.command("version", rich_help_panel="About")(about.version)


def _unwrap(group: typer.Typer) -> None:
    """Let paragraphs of help flow: typer keeps the line breaks that they have in the source."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(each.replace("\n", " ") for each in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _unwrap(inner.typer_instance)


_unwrap(app)


def main() -> None:
    """Entry point of the `trivium` script."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    else:  # what clients log about a broker that is away, our own message says better
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        app()
    except TriviumError as error:
        if debug:
            raise
        print(f"trivium: {error.message}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except BrokenPipeError:  # `trivium tail requests | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if debug or error.filename is None:
            raise
        reason = (error.strerror or str(error)).lower()
        wanted = "expected a path that can be used; name another"
        print(f"trivium: {error.filename}: {reason}; {wanted}", file=sys.stderr)
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()
