"""Clocks that are wrong still wake whoever waits, in time."""

from random import Random

from infra.simulator.log.clock import Clock, ProcessClock, WallClock


def test_wall_clock_alarm_never_fires_early() -> None:
    """A loop that reads its clock would wait for the same time again without end."""
    draw, rung = Random(1), list[float]()
    for at_ms in range(1_000, 3_000):
        true = Clock()
        wall = WallClock(ProcessClock(true))
        wall.ahead_ms = draw.uniform(-500.0, 500.0)
        wall.at(at_ms, lambda wall=wall: rung.append(wall.now_ms))  # type: ignore[misc]  # bound now
        true.step()
    assert all(at_ms <= now_ms < at_ms + 1e-6 for at_ms, now_ms in enumerate(rung, 1_000))
