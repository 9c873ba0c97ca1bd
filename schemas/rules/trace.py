"""Reads the caller's trace, in the form of W3C Trace Context, from a request's headers.

Only a valid `traceparent` is passed on: other values are dropped, as the standard requires of a
process that cannot parse them. Nothing here creates a trace.
"""

import re
from collections.abc import Iterable

HEADER = "traceparent"
# Version 00, or the beginning of later versions; ids of zeros and version ff are invalid.
_FORM = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_of(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes]]:
    """Return the header to pass on in a list; an empty list if none has W3C's form."""
    for name, value in headers:
        if name == HEADER and value is not None and _FORM.fullmatch(value):
            return [(name, value)]
    return []
