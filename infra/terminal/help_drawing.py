"""Imports typer's help output without the parts that our help does not use.

typer's module for it imports rich's rendering of Markdown and tracebacks, and with it a syntax
highlighter and a Markdown parser: more than half of the time of `trivium --help`. Our help uses
rich's own markup, and errors are one line.
"""

from importlib import import_module

from streams.log.stand_ins import stand_ins


def import_rich_help() -> None:
    """Import typer's module for help, if it is not imported yet."""
    with stand_ins("rich.markdown", "rich.traceback"):
        import_module("typer.rich_utils")
