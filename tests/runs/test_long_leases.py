"""Leases of tests end with those who wanted them, in whatever order these end."""

from contextlib import ExitStack

from schemas import fleet
from streams.log import membership
from tests.long_leases import long_leases


def test_long_leases_restore_previous_lease_in_any_order() -> None:
    """Nested patches of the value left the second lease in place for all later tests."""
    usual_ms = fleet.LEASE_MS
    first, second = ExitStack(), ExitStack()
    first.enter_context(long_leases(60_000))
    second.enter_context(long_leases(10_000))
    assert fleet.LEASE_MS == vars(membership)["LEASE_MS"] == 10_000
    first.close()
    assert fleet.LEASE_MS == 10_000
    second.close()
    assert fleet.LEASE_MS == vars(membership)["LEASE_MS"] == usual_ms
