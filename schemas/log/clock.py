"""The clock of what crosses a boundary. Pure code takes the time as an argument instead."""

import time


def wall_ms() -> int:
    """Wall time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
