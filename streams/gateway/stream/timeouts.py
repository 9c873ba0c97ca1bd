"""When a gateway ends a call from its side: nobody else has, or tokens of it were lost.

Pure; asked now and then by `streams/gateway/state.py`, and by simulated gateways.
"""

from schemas.errors import DeadlineExceeded, EngineFailed, TriviumError
from streams.gateway.stream.hub import Call

DEADLINE_GRACE_MS = 2_000  # workers and routers end what is late; this is for when they cannot


def failure_of(call: Call, now_s: float, now_ms: int, gap_ms: int) -> TriviumError | None:
    """Why the call is over; None: it goes on. Notes since when tokens are missing."""
    if now_ms > call.deadline_ms + DEADLINE_GRACE_MS:
        return DeadlineExceeded("the deadline passed and nobody ended the request")
    if not any(stream.has_gap for stream in call.streams):
        call.gap_since_s = 0.0
    elif not call.gap_since_s:
        call.gap_since_s = now_s
    elif (now_s - call.gap_since_s) * 1000 > gap_ms:
        return EngineFailed("tokens in the middle of the answer were lost")
    return None
