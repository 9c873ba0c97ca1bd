"""Which files a request passes: those that `ARCHITECTURE.md` names, and those that run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tests.import_graph import ROOT
from tests.tidy_pages import way_files


def named_files(*folders: str) -> list[str]:
    """Files below the folders in the table from HTTP to the engine, in order."""
    prefixes = tuple(f"{folder}/" for folder in folders)
    return [name for name in way_files() if name.startswith(prefixes)]


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
