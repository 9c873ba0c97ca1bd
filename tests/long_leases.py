"""Leases that no stall of the machine ends, for tests that are not about that end.

`long_leases()` is for members in the test's own process. `LONG_LEASES` is the environment for
programs that a test starts, and reaches whatever these start.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from schemas import fleet
from schemas.log import doubt, membership
from streams.core.fleet import members, workers

_TESTS = Path(__file__).parent
LONG_LEASES = {"PYTHONPATH": f"{_TESTS / 'child_site'}:{_TESTS.parent}"}  # a minute
SLOW_BROKER = {"TRIVIUM_LOG_REQUEST_TIMEOUT_MS": "60000"}  # what programs wait for an answer of it


@contextmanager
def long_leases(lease_ms: int = 100_000) -> Iterator[None]:
    """Meanwhile members of this process live for so long without a heartbeat."""
    with ExitStack() as stack:
        for module in (fleet, doubt, membership, members, workers):
            stack.enter_context(patch.object(module, "LEASE_MS", lease_ms))
        yield
