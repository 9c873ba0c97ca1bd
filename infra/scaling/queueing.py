"""How long work waits at a pool, and how much of a pool must stay spare. Rules of thumb."""

from math import ceil, sqrt

BUSY_MAX = 0.85  # utilization of any pool; beyond it, random arrivals cause long waits
LATE = 4.6  # ln 100: one in 100 exponential waits is longer than this multiple of the mean


def waits_ms(alone_ms: float, busy: float, workers: int) -> float:
    """Return how long a prompt of `alone_ms` waits at workers of utilization `busy` (M/D/n,
    roughly)."""
    return alone_ms * busy / (2 * workers * (1 - busy))


def for_slots(under_way: float, slots: float) -> int:
    """Return the workers of `slots` slots each that `under_way` requests (a mean) need.

    No pool is fuller than `BUSY_MAX`, and sqrt(`under_way`) is spare for fluctuations (Halfin and
    Whitt).
    """
    return ceil(max(under_way / BUSY_MAX, under_way + sqrt(under_way)) / slots)
