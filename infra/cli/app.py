"""Defines the `trivium` command: dispatches to commands, and turns errors into one line.

`infra/cli/commands.py` lists the commands. A command is imported when it is named, and imports what
it needs when it runs, so that help and versions are printed at once.
"""

import logging
import os
import sys

import typer

from infra.cli.commands import MARKUP, CommandsOnUse, add_to
from infra.terminal import help_drawing
from schemas.errors import TriviumError

EXIT_ERROR = 2
_HELP = ["-h", "--help"]

app = typer.Typer(
    name="trivium",
    cls=CommandsOnUse,
    help="Serve language models with prefill and decode workers over Kafka.",
    epilog="Errors are one line; `--debug` anywhere shows where they came from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": _HELP},
)
add_to(app)


def main() -> None:
    """Run the command line: the entry point of the `trivium` script."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    else:  # our own message about an absent broker replaces the client's log lines
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    if len(sys.argv) == 1 or {*_HELP} & {*sys.argv}:
        help_drawing.import_rich_help()
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
        advice = "expected a path that can be used; name another"
        print(f"trivium: {error.filename}: {reason}; {advice}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except Exception as error:
        kafka = sys.modules.get("aiokafka.errors")  # a raised KafkaError implies the import
        if debug or kafka is None or not isinstance(error, kafka.KafkaError):
            raise
        print(f"trivium: the log: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()
