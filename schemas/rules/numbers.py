"""Which numbers of a worker's report can be meant: the one rule, kept by whoever reads it; which
seeds a request may have; and which numbers are floats.

A schema lets through what no worker can mean, such as a transfer of NaN ms or -1 tokens; whoever
works with it fails, or writes what fits no schema. Nothing here does I/O.
"""

import math
import re
from decimal import Decimal
from typing import Any, get_type_hints

from schemas.errors import RecordError
from schemas.records import Continued, Hits, Outcome, Phase

NUMBER_MAX = 1 << 53  # of ms, bytes and attempts; as a float it is still exact
TOKENS_MAX = 1 << 30  # the sum of two fits an int of a schema
_FLOAT_DIGITS = 17  # with which a float is told from any other
# Room is left above for the numbers of choices, which are added to the seed.
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1 - 65_536


def float_of(text: str) -> float:
    """What a JSON text has for a number, for who keeps floats; raises ValueError where no float has
    its digits: another number would be found in its place."""
    number = float(text)
    if not (math.isfinite(number) and _says(number, text)):
        raise ValueError(f"{text[:80]} has more digits than a float; store it as text")
    return number


def _says(number: float, text: str) -> bool:
    """Whether a float that is rounded to a text's digits is what the text says."""
    digits = len(re.split("[eE]", text, maxsplit=1)[0].replace(".", "").lstrip("-0").rstrip("0"))
    try:
        exact = Decimal(text)
    except ArithmeticError:  # of an exponent that Decimal does not have
        return False
    rounded = digits <= _FLOAT_DIGITS and Decimal(f"{number:.{max(digits, 1) - 1}e}") == exact
    return rounded or exact == Decimal(number)


def check_numbers(record: Any) -> None:
    """Raise RecordError unless every number of what workers and gateways report is finite, from 0
    on."""
    for name, limit in _MOST.get(type(record), ()):
        if not 0 <= (number := getattr(record, name)) <= limit:  # NaN is neither
            raise RecordError(
                f"{type(record).__name__} {record.request_id[:64]}: expected {name} from 0 to "
                f"{limit}, found {number}; the worker that wrote it is at fault"
            )


def _limits(kind: type[Any]) -> list[tuple[str, int]]:
    numbers = [name for name, hint in get_type_hints(kind).items() if hint in (int, float)]
    return [(name, TOKENS_MAX if name.endswith("_tokens") else NUMBER_MAX) for name in numbers]


_MOST = {kind: _limits(kind) for kind in (Phase, Outcome, Hits, Continued)}
