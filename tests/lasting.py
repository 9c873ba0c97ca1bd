"""Leases that no stall of the machine ends, for tests with members that are not about that end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from schemas import fleet
from schemas.log import membership
from streams.core import fleet as workers
from streams.core import pool

LASTING_MS = 100_000


@contextmanager
def lasting_leases() -> Iterator[None]:
    """Meanwhile nobody of this process is taken for dead, however late its heartbeats are."""
    with ExitStack() as stack:
        for module in (fleet, membership, workers, pool):
            stack.enter_context(patch.object(module, "LEASE_MS", LASTING_MS))
        yield
