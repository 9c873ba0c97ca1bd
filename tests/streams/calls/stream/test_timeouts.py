"""When a gateway ends a call by itself."""

from schemas.errors import DeadlineExceeded, EngineFailed
from streams.calls.stream.hub import DEADLINE_GRACE_MS, Call, Hub, failure_of
from tests.streams.calls.stream.test_hub import KEY
from tests.streams.gateway.samples import frame


def a_call() -> tuple[Hub, Call]:
    """One stream that is waited for."""
    call = Call(KEY, deadline_ms=9_000, arrived_s=0.0, waits_for_end=False)
    call.add("q1", 0)
    hub = Hub()
    hub.add(call)
    return hub, call


def test_call_fails_after_deadline_grace() -> None:
    _, call = a_call()
    last_ms = 9_000 + DEADLINE_GRACE_MS
    assert failure_of(call, 1.0, last_ms, 500) is None
    error = failure_of(call, 1.0, last_ms + 1, 500)
    assert isinstance(error, DeadlineExceeded)
    assert error.message == "the deadline passed and nobody ended the request"


def test_call_fails_when_gap_lasts_too_long() -> None:
    hub, call = a_call()
    hub.apply(frame("q1", ["c"], first_seq=2, first_char=2), 1.0)
    for now_s in (1.0, 1.25, 1.5):
        assert failure_of(call, now_s, 0, 500) is None
    error = failure_of(call, 1.75, 0, 500)
    assert isinstance(error, EngineFailed)
    assert error.message == "tokens in the middle of the answer were lost"
    hub.apply(frame("q1", ["a", "b"]), 2.0)
    assert failure_of(call, 2.0, 0, 500) is None
    hub.apply(frame("q1", ["e"], first_seq=4, first_char=4), 3.0)
    assert failure_of(call, 3.0, 0, 500) is None, "another gap begins there"
