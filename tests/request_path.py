"""Which files a request passes: those that `ARCHITECTURE.md` names, and those that run."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]


def named_files(folder: str) -> list[str]:
    """Files below a folder in the table from HTTP to the engine, in order, one a row."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("## The way of a request\n")[2].partition("### The way back")[0]
    return re.findall(rf"^\|[^|]*\| `({folder}/\S+\.py)` \|", table, re.MULTILINE)


@contextmanager
def recorded_files(*folders: str, until: Callable[[], object]) -> Iterator[dict[str, None]]:
    """Collect the files below the folders in the order of their first call, until a condition."""
    files: dict[str, None] = {}
    prefixes = tuple(f"{ROOT}/{folder}/" for folder in folders)

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefixes) and not until():
            files[name.removeprefix(f"{ROOT}/")] = None

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
