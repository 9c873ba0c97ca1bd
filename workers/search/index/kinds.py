"""Who waits for a search. Apart from `query.py`, so that settings need not import NumPy."""

from enum import StrEnum


class SearchKind(StrEnum):
    """The class of a search: what the scheduler tells apart."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINK = "link"  # the index itself: lowest
