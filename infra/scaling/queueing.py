"""How long work waits at a pool, and how much of a pool chance wants spare. Rules of thumb."""

from math import ceil, sqrt

BUSY_MAX = 0.85  # of any pool: beyond it, waits follow from chance
LATE = 4.6  # one in a hundred waits so many times as long as the mean, where waits are exponential


def waits_ms(alone_ms: float, busy: float, workers: int) -> float:
    """How long a prompt of `alone_ms` waits at workers that are so busy (M/D/n, roughly)."""
    return alone_ms * busy / (2 * workers * (1 - busy))


def for_slots(under_way: float, slots: float) -> int:
    """Workers with so many slots each for what is under way on average: no pool is fuller than
    `BUSY_MAX`, and the square root of it is spare, by which chance makes it more (Halfin and
    Whitt)."""
    return ceil(max(under_way / BUSY_MAX, under_way + sqrt(under_way)) / slots)
