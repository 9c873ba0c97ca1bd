"""The caller's trace, as W3C Trace Context spells it, on its way with a request.

One home for what may travel: anything else that stands in the header is left behind, as the
standard asks of whoever cannot read it. Nothing here makes a trace.
"""

import re
from collections.abc import Iterable

HEADER = "traceparent"
# Version 00 and what later ones begin with; ids of zeros and version ff mean nothing.
_FORM = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_of(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes]]:
    """The header to hand on, alone in a list; empty where there is none of W3C's form."""
    for name, value in headers:
        if name == HEADER and value is not None and _FORM.fullmatch(value):
            return [(name, value)]
    return []
