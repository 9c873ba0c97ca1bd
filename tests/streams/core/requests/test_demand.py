"""How many requests come, and what each of them takes, on average."""

import pytest

from streams.core.requests.demand import MEMORY_MS, DecayingSums
from tests.streams.builders import T0


def counted(per_s: float, seconds: int, tokens: float = 10.0) -> DecayingSums:
    found = DecayingSums("tokens")
    for number in range(int(per_s * seconds)):
        found.add(T0 + int(number * 1_000 / per_s), tokens=tokens)
    return found


@pytest.mark.parametrize("seconds", [3, 10, 60])
def test_the_rate_is_right_however_long_it_has_been_counted(seconds: int) -> None:
    assert counted(8.0, seconds).per_s(T0 + 1_000 * seconds) == pytest.approx(8.0, rel=0.1)


def test_what_was_is_forgotten() -> None:
    found = counted(8.0, 30)
    assert found.per_s(T0 + 30_000 + int(3 * MEMORY_MS)) < 0.5
    for number in range(300):
        found.add(T0 + 30_000 + number * 100, tokens=30.0)
    assert found.mean("tokens") == pytest.approx(30.0, rel=0.05)


def test_before_anything_came_nothing_is_known() -> None:
    found = DecayingSums("tokens")
    assert (found.per_s(T0), found.mean("tokens")) == (0.0, 0.0)


def test_a_clock_that_is_read_late_changes_nothing() -> None:
    """A heartbeat may be stamped before the last event was."""
    found = counted(8.0, 10)
    assert found.per_s(T0) > 0
    found.add(T0, tokens=10.0)
    assert found.mean("tokens") == pytest.approx(10.0)
