"""Orders of a router that knows less of workers than the one that has placed the request."""

from schemas.records import OutcomeKind, PhaseKind, Role
from streams.core.states import State
from tests.streams import builders
from tests.streams.core.router_setups import split, state_of


def test_cancellation_sends_no_order_to_worker_of_unknown_role() -> None:
    """`fleet` is compacted: the next router reads only the worker's present role."""
    on = split()
    on.request("r1")
    (work,) = on.works
    on.fleet(builders.registration("p0", Role.DECODE, partition=on.workers["p0"].partition))
    last = {(type(e.record), e.record.member_id): (e, at_ms) for e, at_ms in on.fleet_log}
    on.fleet_log = sorted(last.values(), key=lambda entry: entry[0].offset)
    on.taken_over()
    assert state_of(on, "r1") is State.PREFILLING and on.works == [work]
    on.cancel("r1")
    assert state_of(on, "r1") is State.CANCELLING and not on.cancels
    on.phase(work, PhaseKind.PREFILL_DONE)
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
