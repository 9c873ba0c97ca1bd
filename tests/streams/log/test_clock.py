"""The clock that durations are taken from, whatever happens to the host's."""

import pytest

from streams.log.clock import LASTING_MS, SLEWED_MS, SteadyClock

MS = 1_000_000
T0 = 1_700_000_000_000


class Host:
    """A host whose wall clock is off by `off_ms`, and its steady clock."""

    def __init__(self) -> None:
        self.now_ms, self.off_ms = 5_000, 0
        self.clock = SteadyClock(
            lambda: (T0 + self.now_ms + self.off_ms) * MS, lambda: self.now_ms * MS
        )

    def pass_ms(self, passed_ms: int, step_ms: int = 50) -> list[int]:
        """Return the clock's readings at regular steps."""
        readings = []
        for _ in range(passed_ms // step_ms):
            self.now_ms += step_ms
            readings.append(self.clock.ms())
        return readings


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000, SLEWED_MS + 1])
def test_clock_ignores_jump_of_one_second(jump_ms: int) -> None:
    """Otherwise router time would stand until the wall clock has caught up."""
    host = Host()
    host.pass_ms(1_000)
    host.off_ms = jump_ms
    readings = host.pass_ms(1_000)
    host.off_ms = 0
    readings += host.pass_ms(1_000)
    assert readings == list(range(T0 + 6_050, T0 + 8_001, 50))


@pytest.mark.parametrize("off_ms", [3_600_000, -3_600_000])
def test_clock_follows_lasting_new_time(off_ms: int) -> None:
    host = Host()
    host.off_ms = off_ms
    readings = host.pass_ms(LASTING_MS)
    assert readings == list(range(T0 + 5_050, T0 + 5_001 + LASTING_MS, 50))
    host.pass_ms(50)
    assert host.clock.ms() == T0 + host.now_ms + off_ms


@pytest.mark.parametrize("off_ms", [SLEWED_MS, -SLEWED_MS])
def test_clock_slews_small_offsets_without_running_backwards(off_ms: int) -> None:
    host = Host()
    host.off_ms = off_ms
    readings = host.pass_ms(LASTING_MS + 1_000)
    steps = [after - before for before, after in zip(readings, readings[1:], strict=False)]
    assert 47 <= min(steps) and max(steps) <= 53
    assert readings[-1] == T0 + host.now_ms + off_ms
