"""Leases that no stall of the machine ends, for tests that are not about that end.

`long_leases()` is for members in the test's own process. `process_leases()` is the environment for
programs that a test starts, and reaches whatever these start; `LONG_LEASES` is the usual one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas import fleet
from streams.core.fleet import workers
from streams.log import lease_monitor, membership

_TESTS = Path(__file__).parent
_PATH = f"{_TESTS / 'child_site'}:{_TESTS.parent}"
LONG_LEASE_MS = 60_000
BRIEF_LEASE_MS = 10_000  # where an end is waited for: a busy machine ends none, and a stall few
SLOW_BROKER = {"TRIVIUM_LOG_REQUEST_TIMEOUT_MS": "60000"}  # what programs wait for an answer of it


def process_leases(lease_ms: int) -> dict[str, str]:
    """Variables for a program whose members are to live for so long without a heartbeat."""
    return {"PYTHONPATH": _PATH, "TEST_LEASE_MS": str(lease_ms)}


LONG_LEASES = process_leases(LONG_LEASE_MS)


_USUAL_MS = fleet.LEASE_MS
_lease_ms_by_user: dict[object, int] = {}  # by those who want another lease, the newest last


@contextmanager
def long_leases(lease_ms: int = 100_000) -> Iterator[None]:
    """Give members of this process long leases; the newest call that is open decides."""
    who = object()
    _lease_ms_by_user[who] = lease_ms
    _apply()
    try:
        yield
    finally:
        del _lease_ms_by_user[who]
        _apply()


def _apply() -> None:
    lease_ms = next(reversed(_lease_ms_by_user.values()), _USUAL_MS)
    for module in (fleet, lease_monitor, membership, workers):
        vars(module)["LEASE_MS"] = lease_ms
