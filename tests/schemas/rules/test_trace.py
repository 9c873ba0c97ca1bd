"""Which `traceparent` travels: W3C's form, and nothing else."""

import pytest

from schemas.rules.trace import trace_of
from tests.schemas.examples import TRACEPARENT

ZEROS = b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01"


def test_trace_of_keeps_only_one_traceparent() -> None:
    headers = [("other", b"x"), ("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)]
    assert trace_of(headers) == [("traceparent", TRACEPARENT)]
    assert trace_of([("other", TRACEPARENT)]) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"t",
        b"00-1-2-01",
        TRACEPARENT.upper(),
        TRACEPARENT + b"\n",
        TRACEPARENT + b"-more",
        b"ff" + TRACEPARENT[2:],
        ZEROS,
        TRACEPARENT[:36] + b"0" * 16 + b"-01",
        b"a" * 8_388_145,
    ],
)
def test_trace_of_drops_invalid_traceparent(value: bytes | None) -> None:
    """A header of eight megabytes would fit a request, but not its work."""
    assert trace_of([("traceparent", value)]) == []
