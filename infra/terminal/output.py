"""Prints what commands output: tables on a console, JSON on standard output."""

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = 2
PIPED_COLUMNS = 160  # used where no terminal gives a width


def stdout_console() -> "Console":
    """Return the console for tables; a pipe has no width and gets room for all their columns."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if has_width else PIPED_COLUMNS)


def print_indented(console: "Console", text: str, style: str, *, cut: bool = False) -> None:
    """Print the text indented, wrapped to the terminal's width, or as one line if `cut`."""
    from rich.padding import Padding
    from rich.text import Text

    content = Text(text.strip(), style=style, no_wrap=cut, overflow="ellipsis" if cut else None)
    console.print(Padding(content, (0, 0, 0, _INDENT), expand=False))


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
