"""Several models on one router: none waits for another's workers, and none gets another's work."""

from typing import Any

import pytest

from schemas.records import Orchestration, PhaseKind, Role, Session
from streams.core.states import State
from tests.streams.builders import ALL
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import state_of


def two_models(**settings: Any) -> RouterHarness:
    """A replica with one credit for each of the models `tiny` and `other`."""
    on = RouterHarness(**settings)
    on.worker("x0", Role.REPLICA, window=1)
    on.worker("y0", Role.REPLICA, window=1, model="other")
    on.pass_ms(250)
    return on


def placed_on(on: RouterHarness, request_id: str, **changes: Any) -> str:
    """The worker that gets a new request at once; empty if it waits."""
    on.request(request_id, **changes)
    return next((work.worker_id for work in on.works if work.request_id == request_id), "")


def test_full_model_delays_no_other_one() -> None:
    on = two_models()
    assert placed_on(on, "r1") == "x0"
    assert placed_on(on, "r2") == placed_on(on, "r3") == ""
    assert placed_on(on, "r4", model="other") == "y0"
    on.outcome(on.works[0])
    assert (on.works[-1].request_id, on.works[-1].worker_id) == ("r2", "x0")


def test_full_queue_of_one_model_sheds_no_request_of_another() -> None:
    on = two_models(queue_requests_max=2)
    placed_on(on, "own", model="other")
    placed_on(on, "waits", model="other")
    for number in range(6):
        on.request(f"r{number}")
    assert len(on.outcomes) == 3
    assert state_of(on, "waits") is State.QUEUED


def test_handover_waits_only_for_decode_workers_of_its_model() -> None:
    on = RouterHarness()
    for name, model in (("a", "tiny"), ("b", "other")):
        on.worker(f"p-{name}", Role.PREFILL, window=4, model=model)
        on.worker(f"d-{name}", Role.DECODE, window=1, model=model)
    on.pass_ms(250)
    for request_id, model in (("r1", "tiny"), ("r2", "tiny"), ("r3", "other")):
        on.request(request_id, model=model)
        on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    assert [state_of(on, r) for r in ("r1", "r2", "r3")] == [
        *(State.DECODING, State.HANDING_OVER, State.DECODING),
    ]


def test_unknown_model_waits_and_expires() -> None:
    on = two_models()
    assert placed_on(on, "r1", model="nobody", deadline_ms=on.now_ms + 1_000) == ""
    on.pass_ms(1_500)
    assert on.outcomes["r1"].error is not None
    assert "no worker was there" in on.outcomes["r1"].error.message
    on.pass_ms(2_000)
    assert sorted(on.router.tables.queues) == []
    assert [backlog.model for backlog in on.router.backlogs(on.now_ms)] == ["other", "tiny"]


def test_worker_that_starts_with_another_model_serves_it() -> None:
    on = two_models()
    assert placed_on(on, "r1", model="other") == "y0"
    on.request("r2", model="other")
    on.worker("x0", Role.REPLICA, window=1, model="other")
    assert on.works[-1].worker_id == "x0"
    assert placed_on(on, "r3") == ""
    assert "tiny" not in {m for m, pools in on.router.tables.fleet.models.items() if pools}


def test_backlogs_are_counted_by_model() -> None:
    on = two_models()
    for number in range(3):
        on.request(f"r{number}", model="other")
    second, first = on.router.backlogs(on.now_ms)
    assert (second.model, second.waiting) == ("other", 2)
    assert (first.model, first.waiting, first.requests_per_s) == ("tiny", 0, 0.0)


def sessions_of(on: RouterHarness) -> list[Session]:
    return list(on.router.tables.sessions.all().values())


@pytest.mark.parametrize("changes", [{"model": "other"}, {"adapter": "law"}])
def test_session_that_changes_its_model_has_no_kv_there(changes: dict[str, Any]) -> None:
    on = RouterHarness()
    for name in ("x0", "x1"):
        on.worker(name, Role.REPLICA, window=4, adapters=("law",))
    on.worker("y0", Role.REPLICA, window=4, model="other")
    on.pass_ms(250)
    on.request("r1", session_id="s")
    on.outcome(on.works[-1])
    (session,) = sessions_of(on)
    assert session.model == "tiny"
    on.request("r2", session_id="s", **changes)
    placed = [decision for decision in on.decisions if decision.request_id == "r2"][-1]
    assert placed.session_tokens == 0 and placed.reason.value != "session_worker"
    on.outcome(on.works[-1])
    (session,) = sessions_of(on)
    assert session.model == (changes.get("adapter") or changes["model"])
    assert on.used["r2"].model == session.model


def with_adapters(role: Role = Role.REPLICA) -> RouterHarness:
    """Three workers: one cannot load `law`, one can, one has it loaded."""
    on = RouterHarness()
    on.worker("x0", role, window=2)
    on.worker("x1", role, window=2, adapters=("law", "tax"))
    on.worker("x2", role, window=2, adapters=("law", "tax"), loaded=("law",))
    on.pass_ms(250)
    return on


def test_request_with_adapter_goes_where_it_is_loaded() -> None:
    on = with_adapters()
    assert [placed_on(on, f"r{n}", adapter="law") for n in range(5)] == [
        *("x2", "x2", "x1", "x1", ""),
    ]
    assert [work.adapter for work in on.works] == ["law"] * 4


def test_adapter_counts_as_loaded_from_its_first_dispatch_on() -> None:
    on = with_adapters()
    first = placed_on(on, "r1", adapter="tax")
    assert first in ("x1", "x2")
    assert placed_on(on, "r2", adapter="tax") == first
    on.beat(on.workers[first])  # it has not loaded it yet
    on.outcome(on.works[0])
    assert placed_on(on, "r3", adapter="tax") == first


@pytest.mark.parametrize("policy", ["round_robin", "pairs"])
def test_workers_in_turn_are_those_that_can_load_the_adapter(policy: str) -> None:
    on = RouterHarness(policy=policy)
    for number, adapters in enumerate([(), ("law",), ("law",)]):
        on.worker(f"p{number}", Role.PREFILL, window=4, adapters=adapters)
        on.worker(f"d{number}", Role.DECODE, window=4, adapters=adapters)
    on.pass_ms(250)
    assert [placed_on(on, f"r{n}", adapter="law") for n in range(3)] == ["p1", "p2", "p1"]


@pytest.mark.parametrize("orchestration", list(ALL))
def test_adapter_reaches_both_workers_of_a_pair(orchestration: Orchestration) -> None:
    on = RouterHarness(orchestration=orchestration.value)
    on.worker("p0", Role.PREFILL, window=4, can=ALL, adapters=("law",))
    on.worker("d0", Role.DECODE, window=4, can=ALL, adapters=("law",))
    on.pass_ms(250)
    on.request("r1", adapter="law")
    kind = PhaseKind.KV_ALLOCATED if orchestration is Orchestration.DECODE_FIRST else None
    on.phase(on.works[-1], kind or PhaseKind.PREFILL_DONE)
    assert {work.worker_id for work in on.works} == {"p0", "d0"}
    assert {work.adapter for work in on.works} == {"law"}


CHANGES: list[dict[str, Any]] = [{"adapter": "law"}, {"model": "other"}, {}]


def test_takeover_restores_models_and_adapters() -> None:
    on = with_adapters()
    on.worker("y0", Role.REPLICA, window=1, model="other")
    for number, changes in enumerate(CHANGES):
        on.request(f"r{number}", **changes)
    assert on.rebuilt(on.log).view() == on.router.view()
