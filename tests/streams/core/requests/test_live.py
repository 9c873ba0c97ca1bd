"""Live requests by their deadlines."""

from schemas.records import OutcomeKind
from streams.config import RouterSettings
from streams.core.effects import End
from streams.core.events import Tick
from streams.core.requests.live import new_live_request
from streams.core.tables import LiveRequests, ModelQueues
from tests.streams import builders
from tests.streams.builders import T0, retrieval
from tests.streams.core.router_setups import replicas


def test_request_with_several_passed_deadlines_is_due_once() -> None:
    """The search's deadline and its own passed while the router slept."""
    on = replicas(1)
    on.request("r1", retrieval=retrieval(on.now_ms + 100), deadline_ms=on.now_ms + 500)
    on.now_ms += 1_000
    ends = [effect for effect in on.apply(Tick()) if isinstance(effect, End)]
    assert [end.outcome.kind for end in ends] == [OutcomeKind.EXPIRED]


def test_live_requests_forget_deadlines_of_ended_requests() -> None:
    """They are dropped long before they pass, which is an hour later."""
    table = LiveRequests(ModelQueues(RouterSettings()))
    survivor = new_live_request(builders.request("kept", deadline_ms=T0 + 5_000), 0)
    table.add(survivor)
    for number in range(10_000):
        live = new_live_request(builders.request(f"r{number}", deadline_ms=T0 + 3_600_000), 0)
        table.add(live)
        table.drop(live)
    assert len(table._deadlines) < 2_000
    assert table.due(T0 + 5_000) == [survivor]
