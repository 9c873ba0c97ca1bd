"""Orders of a router that knows less of workers than the one that has placed the request."""

from schemas.records import OutcomeKind, PhaseKind, Role
from streams.core.states import State
from tests.streams import builders
from tests.streams.core.router_setups import split, state_of


def test_a_worker_whose_role_a_router_never_knew_is_told_nothing_and_ends_what_it_has() -> None:
    """`fleet` is compacted: who takes over reads that the worker decodes, and not that it did
    anything else before."""
    on = split()
    on.request("r1")
    (work,) = on.works
    on.fleet(builders.registration("p0", Role.DECODE, partition=on.workers["p0"].partition))
    last = {(type(e.record), e.record.member_id): (e, at_ms) for e, at_ms in on.fleet_log}
    on.fleet_log = sorted(last.values(), key=lambda each: each[0].offset)
    on.taken_over()
    assert state_of(on, "r1") is State.PREFILLING and on.works == [work]
    on.cancel("r1")
    assert state_of(on, "r1") is State.CANCELLING and not on.cancels
    on.phase(work, PhaseKind.PREFILL_DONE)
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
