"""The valid ranges of numbers in reports and of seeds, and which numbers are exact floats.

A schema accepts numbers that no worker can mean, such as a transfer of NaN ms or -1 tokens; code
that computes with them fails, or writes values that fit no schema. All readers of reports check
them with this. Nothing here does I/O.
"""

import math
import re
from decimal import Decimal
from typing import Any, get_type_hints

from schemas.errors import RecordError
from schemas.records import Continued, Hits, Outcome, Phase

NUMBER_MAX = 1 << 53  # of ms, bytes and attempts; as a float it is still exact
TOKENS_MAX = 1 << 30  # the sum of two fits an int of a schema
_FLOAT_DIGITS = 17  # digits that identify a float
# The upper bound leaves space for the numbers of choices, which are added to the seed.
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1 - 65_536


def float_of(text: str) -> float:
    """Return the float of a JSON number. Raise ValueError if no float has its digits: filters would
    match another number."""
    number = float(text)
    if not (math.isfinite(number) and _says(number, text)):
        raise ValueError(f"{text[:80]} has more digits than a float; store it as text")
    return number


def _says(number: float, text: str) -> bool:
    """Return whether a float, rounded to a text's digits, equals the text's number."""
    digits = len(re.split("[eE]", text, maxsplit=1)[0].replace(".", "").lstrip("-0").rstrip("0"))
    try:
        exact = Decimal(text)
    except ArithmeticError:  # an exponent beyond Decimal's
        return False
    rounded = digits <= _FLOAT_DIGITS and Decimal(f"{number:.{max(digits, 1) - 1}e}") == exact
    return rounded or exact == Decimal(number)


def check_numbers(record: Any) -> None:
    """Raise RecordError unless every number in a worker's or gateway's report is finite and at
    least 0."""
    for name, limit in _MOST.get(type(record), ()):
        if not 0 <= (number := getattr(record, name)) <= limit:  # false for NaN
            raise RecordError(
                f"{type(record).__name__} {record.request_id[:64]}: expected {name} from 0 to "
                f"{limit}, found {number}; the worker that wrote it is at fault"
            )


def _limits(kind: type[Any]) -> list[tuple[str, int]]:
    numbers = [name for name, hint in get_type_hints(kind).items() if hint in (int, float)]
    return [(name, TOKENS_MAX if name.endswith("_tokens") else NUMBER_MAX) for name in numbers]


_MOST = {kind: _limits(kind) for kind in (Phase, Outcome, Hits, Continued)}
