"""Makes typer's drawing of help ready, without what our help never shows.

typer's module for it imports how rich draws Markdown and tracebacks, and so a highlighter of
programs and a parser of Markdown: more than half of what `trivium --help` would take. Our help is
rich's own markup, and errors are one line.
"""

from importlib import import_module

from schemas.stand_ins import stand_ins


def import_rich_help() -> None:
    """Import typer's module for help, if it is not imported yet."""
    with stand_ins("rich.markdown", "rich.traceback"):
        import_module("typer.rich_utils")
