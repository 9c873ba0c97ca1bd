"""Help is drawn without Markdown and tracebacks, which are there for whoever calls them."""

import os
import subprocess
import sys

from tests.infra.cli.trivium_runner import PLAIN

_HELP = """
import sys
if sys.argv.pop() == "ready":
    from infra.terminal import help_drawing
    help_drawing.import_rich_help()
from infra.cli.app import app
app(["pool", "move", "--help"])
"""
_LATER = """
import sys
from infra.terminal import help_drawing
help_drawing.import_rich_help()
from typer import rich_utils
assert "rich.markdown" not in sys.modules
drawn = rich_utils.Markdown("*a*")
from rich.markdown import Markdown
assert type(drawn) is Markdown
"""


def _printed(code: str, *arguments: str) -> str:
    program, env = [sys.executable, "-c", code, *arguments], {**os.environ, **PLAIN}
    process = subprocess.run(program, capture_output=True, text=True, env=env, check=True)
    return process.stdout


def test_help_without_markdown_import_looks_the_same() -> None:
    assert _printed(_HELP, "ready") == _printed(_HELP, "as it is")


def test_rich_markdown_is_imported_on_first_use() -> None:
    _printed(_LATER)
