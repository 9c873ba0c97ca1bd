"""Live requests by their deadlines."""

from schemas.records import OutcomeKind
from streams.core.effects import End
from streams.core.events import Tick
from tests.streams.builders import retrieval
from tests.streams.core.router_setups import replicas


def test_a_request_of_which_several_times_have_passed_is_due_once() -> None:
    """The search's and its own, while the router slept (issue 14, 4)."""
    on = replicas(1)
    on.request("r1", retrieval=retrieval(on.now_ms + 100), deadline_ms=on.now_ms + 500)
    on.now_ms += 1_000
    ends = [effect for effect in on.apply(Tick()) if isinstance(effect, End)]
    assert [end.outcome.kind for end in ends] == [OutcomeKind.EXPIRED]
