"""Leases that no stall of the machine ends, for tests with members that are not about that end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from schemas import fleet
from schemas.log import membership
from streams.core.fleet import members as workers
from streams.core.fleet import workers as pool


@contextmanager
def lasting_leases(lease_ms: int = 100_000) -> Iterator[None]:
    """Meanwhile members of this process live for so long without a heartbeat."""
    with ExitStack() as stack:
        for module in (fleet, membership, workers, pool):
            stack.enter_context(patch.object(module, "LEASE_MS", lease_ms))
        yield
