"""What a fork server imports for its tests: tells who it is, and asks for a child of its own."""

import json
import os
import sys
from pathlib import Path

from workers import forks

imported_by = os.getpid()


def tell(file: str) -> None:
    """Who this is, in a line."""
    about = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "imported_by": imported_by,
        "cores": sorted(os.sched_getaffinity(0)),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
    }
    with Path(file).open("a") as lines:
        lines.write(json.dumps(about) + "\n")


def main(file: str, *variables: str) -> None:
    """The child gets these variables, NAME=VALUE, too."""
    tell(file)
    os.environ |= dict(variable.split("=") for variable in variables)
    child = forks.ForkContext().Process(target=tell, args=(file,), daemon=True)
    child.start()
    child.join()
    print("its child ended with", child.exitcode, flush=True)
    sys.exit(3)
