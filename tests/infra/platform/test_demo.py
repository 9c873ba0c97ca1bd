"""`trivium demo --platform` with simulated engines: the whole loop, and what is left of it. `make
test-platform` runs it: it needs PostgreSQL and Kafka Connect."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.platform.demo import EDITS, LOAD

pytestmark = pytest.mark.platform
DEMO = (sys.executable, "-m", "infra.cli.app", "demo", "--platform", "--engine", "sim", "--json")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may pass through: root gives the server to another one."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def begin(place: Path) -> "subprocess.Popen[str]":
    environ = {**os.environ, "TRIVIUM_HOME": str(place / "home"), "TMPDIR": str(place)}
    return subprocess.Popen(
        DEMO, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def leftovers(place: Path) -> list[str]:
    """Processes that name the folder, and the files left in it."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_text().replace("\0", " ")
            commands += [words] * (str(place) in words)
    return commands + [
        str(path) for path in (*place.glob("trivium-*"), *place.glob("home/platform"))
    ]


def test_platform_demo_looks_up_rows_and_answers_questions(place: Path) -> None:
    demo = begin(place)
    output, errors = demo.communicate()
    assert demo.returncode == 0, errors[-4_000:]
    report = json.loads(output)
    assert report["good"]
    assert report["edit_cited"] and report["delete_gone"]
    assert len(report["found_ms"]) == EDITS + 1
    assert (report["answers"], report["errors"]) == (LOAD, 0)
    assert leftovers(place) == []


def test_platform_demo_cleans_up_after_interrupt(place: Path) -> None:
    """The interrupt comes while all processes run and rows are on their way."""
    demo = begin(place)
    assert demo.stderr is not None
    for line in demo.stderr:
        if "rows of documents" in line:
            break
    assert len(leftovers(place)) > 5
    demo.send_signal(signal.SIGINT)
    demo.communicate()
    assert demo.returncode != 0
    assert leftovers(place) == []
