"""Adapters that only some workers of a model can load: their requests wait alone, or go where they
can be answered.
"""

from typing import Any

from schemas.records import MemberState, Orchestration, OutcomeKind, PhaseKind, Role
from streams.core.states import State
from tests.streams.builders import ALL
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import state_of
from tests.streams.core.test_router_models import placed_on

LAW: dict[str, Any] = {"adapter": "law"}


def replicas(**settings: Any) -> RouterHarness:
    """Two replicas with one credit each; no worker can load an adapter."""
    on = RouterHarness(**settings)
    for name in ("x0", "x1"):
        on.worker(name, Role.REPLICA, window=1)
    on.pass_ms(250)
    return on


def test_adapter_that_no_worker_can_load_delays_no_other_request() -> None:
    on = replicas()
    assert placed_on(on, "law", **LAW) == ""
    assert {placed_on(on, "r1"), placed_on(on, "r2")} == {"x0", "x1"}
    assert state_of(on, "law") is State.QUEUED
    assert on.router.backlogs(on.now_ms)[0].waiting == 1


def test_request_is_placed_when_worker_comes_that_can_load_its_adapter() -> None:
    on = replicas()
    placed_on(on, "law", **LAW)
    placed_on(on, "tax", adapter="tax")
    on.worker("x2", Role.REPLICA, window=1, adapters=("law",))
    assert [(work.request_id, work.worker_id) for work in on.works] == [("law", "x2")]
    assert on.rebuilt(on.log).view() == on.router.view()


def test_unserved_request_expires_or_is_cancelled() -> None:
    on = replicas()
    placed_on(on, "law", deadline_ms=on.now_ms + 500, **LAW)
    placed_on(on, "other", **LAW)
    on.pass_ms(1_000)
    error = on.outcomes["law"].error
    assert error is not None and "no worker was there" in error.message
    on.cancel("other")
    assert on.outcomes["other"].kind is OutcomeKind.CANCELLED
    assert not on.router.tables.queues.of("tiny").unserved


def test_full_queue_sheds_unserved_requests_first() -> None:
    on = replicas(queue_requests_max=2)
    for name in ("l1", "l2"):
        placed_on(on, name, **LAW)
    placed_on(on, "r1")
    placed_on(on, "r2")
    for name in ("w1", "w2", "w3"):
        on.request(name)
    assert {"l1", "l2"} < on.outcomes.keys() and len(on.outcomes) == 3
    assert {outcome.kind for outcome in on.outcomes.values()} == {OutcomeKind.SHED}
    assert on.router.tables.queues.of("tiny").unserved.tokens == 0


def test_decode_worker_answers_alone_if_no_prefill_worker_can_load_the_adapter() -> None:
    on = RouterHarness()
    on.worker("p0", Role.PREFILL, window=4)
    on.worker("d0", Role.DECODE, window=4)
    on.worker("d1", Role.DECODE, window=4, adapters=("law",))
    on.pass_ms(250)
    assert placed_on(on, "r1", **LAW) == "d1"
    assert placed_on(on, "r2") == "p0"


def test_handover_that_lacks_its_adapter_delays_no_other_one() -> None:
    on = RouterHarness(orchestration=Orchestration.PREFILL_FIRST.value)
    on.worker("p0", Role.PREFILL, window=4, can=ALL, adapters=("law",))
    on.worker("d0", Role.DECODE, window=4, can=ALL)
    on.worker("d1", Role.DECODE, window=4, can=ALL, adapters=("law",))
    on.pass_ms(250)
    placed_on(on, "law", **LAW)
    placed_on(on, "plain")
    law, plain = on.works
    on.workers["d1"].state = MemberState.DRAINING
    on.beat(on.workers["d1"])
    on.phase(law, PhaseKind.PREFILL_DONE)
    on.phase(plain, PhaseKind.PREFILL_DONE)
    assert (state_of(on, "law"), state_of(on, "plain")) == (State.HANDING_OVER, State.DECODING)
    on.workers["d1"].state = MemberState.READY
    on.beat(on.workers["d1"])
    assert state_of(on, "law") is State.DECODING
