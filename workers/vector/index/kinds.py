"""The classes of searches, apart from `query.py` so that settings need not import NumPy."""

from enum import StrEnum


class SearchKind(StrEnum):
    """The class of a search, by which the scheduler treats it."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINK = "link"  # for the linking of new rows; the lowest class
