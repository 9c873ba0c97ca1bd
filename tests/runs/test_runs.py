"""What pytest does here beside running tests, on small runs of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAKS = """
import gc, socket

def test_breaks_off():
    kept = Itself(socket.socket())  # in a circle, which only the garbage collector opens
    raise RuntimeError("in its middle")

class Itself:
    def __init__(self, kept):
        self.kept, self.circle = kept, self

def test_is_not_to_blame():
    gc.collect()
"""
SLOW = """
import pytest, time

@pytest.mark.timeout(0.2)
def test_near_its_limit():
    until_s = time.monotonic() + 0.11
    while time.monotonic() < until_s:
        pass

def test_far_from_it():
    pass
"""


def outcome(folder: Path, source: str, *options: str) -> str:
    """What a run of these tests says."""
    (folder / "test_small.py").write_text(source)
    plugin_names = (
        "tests.runs.after_failures",
        "tests.runs.near_limits",
        "no:schemathesis",
        "no:langsmith_plugin",
    )
    plugins = [word for name in plugin_names for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *plugins, *options]
    result = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(folder), str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return result.stdout + result.stderr


def test_run_ignores_sockets_left_open_by_failed_test(tmp_path: Path) -> None:
    """Warnings about sockets of a test that was ended once failed the test after it."""
    assert "1 failed, 1 passed in" in outcome(tmp_path, LEAKS)


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "dealt"])
def test_run_lists_tests_near_their_timeout(tmp_path: Path, processes: tuple[str, ...]) -> None:
    output = outcome(tmp_path, SLOW, "--timeout=100", *processes)
    (line,) = [line for line in output.splitlines() if " of 0.2 s: " in line]
    assert line.endswith("test_small.py::test_near_its_limit")
    assert "took more than half of their timeout" in output and "test_far_from_it" not in output
