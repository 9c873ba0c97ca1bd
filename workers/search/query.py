"""What a search asks for, and what it gives back."""

from enum import IntEnum


class Kind(IntEnum):
    """Classes of searches: whom an answer keeps waiting."""

    PREFILL = 0  # a prompt that cannot be computed yet; has a deadline
    DECODE = 1  # a running answer that goes on meanwhile
    LINK = 2  # the index itself, which links new rows
