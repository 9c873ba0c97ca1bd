"""Decides when a gateway ends a call by itself: it is late, or tokens of it were lost.

Pure. `streams/gateway/state.py` calls it a few times per second; simulated gateways do, too.
"""

from schemas.errors import DeadlineExceeded, EngineFailed, TriviumError
from streams.calls.stream.hub import Call

DEADLINE_GRACE_MS = 2_000  # workers and routers end late requests, unless they are lost


def failure_of(call: Call, now_s: float, now_ms: int, gap_ms: int) -> TriviumError | None:
    """Return the error that ends the call, or None. Also records since when tokens are missing."""
    if now_ms > call.deadline_ms + DEADLINE_GRACE_MS:
        return DeadlineExceeded("the deadline passed and nobody ended the request")
    if not any(stream.has_gap for stream in call.streams):
        call.gap_since_s = 0.0
    elif not call.gap_since_s:
        call.gap_since_s = now_s
    elif (now_s - call.gap_since_s) * 1000 > gap_ms:
        return EngineFailed("tokens in the middle of the answer were lost")
    return None
