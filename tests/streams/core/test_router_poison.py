"""A request over which the core itself fails: counted in the log, and given up in the end."""

from collections.abc import Callable
from typing import Any

import pytest

from schemas.records import CancelWork, DecisionKind, OutcomeKind, PhaseKind, Reason, Role, Work
from streams.config import RouterSettings
from streams.core import router as router_module
from streams.core.effects import Decide, Dispatch, Effect, End
from streams.core.events import (
    ContinuedArrived,
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionEvent,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    Tick,
)
from streams.core.handlers import observations
from streams.core.handlers.attempts import Attempts
from streams.core.handlers.endings import Endings
from streams.core.handlers.retrievals import Retrievals
from streams.core.placement.placer import Placer
from streams.core.router import Router
from streams.core.tables import RouterTables
from tests.streams import builders
from tests.streams.builders import ROUTER, T0
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas
from tests.streams.gateway.samples import stream_end

BAD = RequestArrived(builders.request("bad", 13), PARTITION)
GOOD = RequestArrived(builders.request("good", 9), PARTITION)


class Poisoned(Exception):
    """A bug that one request meets."""


def fleet() -> list[Event]:
    """A prefill and a decode worker with credits."""
    events: list[Event] = []
    for number, (name, role) in enumerate((("p0", Role.PREFILL), ("d0", Role.DECODE))):
        registration = builders.registration(name, role, partition=number)
        events.append(FleetRecordArrived(registration, 2 * number))
        events.append(FleetRecordArrived(builders.beat(name, 1, {role: 4}), 2 * number + 1))
    return events


def take_over(log: list[PartitionEvent], *then: Event) -> list[Effect]:
    """A router takes the partition over, and reads on; what it writes is in the log when it ends.

    If an event ends it, then with the note that the agents write of whom it failed over.
    """
    router = Router(ROUTER, RouterSettings(apply_tries_max=3))
    effects: list[Effect] = []
    try:
        for event in (*fleet(), PartitionTaken(PARTITION), *log, PartitionReady(PARTITION), *then):
            effects += router.apply(event, T0)
    except Poisoned:
        effects += router.blame(T0)
    for effect in effects:
        if isinstance(effect, Decide):
            written = effect.decision
            assert (effect.partition, written.router_id) == (PARTITION, ROUTER)
            assert written.policy and written.queue_length >= 0
            log.append(DecisionLoaded(effect.decision, PARTITION))
        elif isinstance(effect, End):
            log.append(OutcomeArrived(effect.outcome, PARTITION))
    return effects


def blamed(effects: list[Effect]) -> list[str]:
    return [
        effect.decision.request_id
        for effect in effects
        if isinstance(effect, Decide)
        and (effect.decision.kind, effect.decision.reason)
        == (DecisionKind.FAIL, Reason.ROUTER_RESTARTED)
    ]


def break_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placer.place

    def broken(self: Placer, case: Any, fleet: Any, now_ms: int) -> Any:
        if case.request.request_id == "bad":
            raise Poisoned
        return place(self, case, fleet, now_ms)

    monkeypatch.setattr(Placer, "place", broken)


def break_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(estimates: Any, live: Any, phase: Any, now_ms: int) -> None:
        raise Poisoned

    monkeypatch.setattr(observations, "observe_prefill", broken)


@pytest.mark.parametrize("then", [(BAD,), (Tick(),)], ids=["its own", "any"])
def test_request_fails_after_too_many_router_failures(
    monkeypatch: pytest.MonkeyPatch, then: tuple[Event, ...]
) -> None:
    break_placement(monkeypatch)
    log: list[PartitionEvent] = [BAD, GOOD]
    for _ in range(3):
        assert blamed(take_over(log, *then)) == ["bad"]
    effects = take_over(log, *then, BAD)
    (end,) = [effect for effect in effects if isinstance(effect, End)]
    assert (end.outcome.request_id, end.outcome.kind) == ("bad", OutcomeKind.FAILED)
    assert end.outcome.error is not None and end.outcome.error.code == "router_failed"
    assert "3 routers failed over it" in end.outcome.error.message
    placed = [effect.record for effect in effects if isinstance(effect, Dispatch)]
    assert [record.request_id for record in placed] == ["good"]
    assert not [effect for effect in take_over(log, *then, BAD) if isinstance(effect, End)]


def test_router_cancels_work_of_poisoned_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[PartitionEvent] = [BAD]
    (work,) = [e.record for e in take_over(log) if isinstance(e, Dispatch)]
    assert isinstance(work, Work)
    prefill_done = PhaseArrived(builders.phase(work, PhaseKind.PREFILL_DONE), PARTITION)
    break_learning(monkeypatch)
    for _ in range(3):
        assert blamed(take_over(log, prefill_done)) == ["bad"]
    log.append(prefill_done)
    effects = take_over(log, prefill_done)
    orders = [e.record for e in effects if isinstance(e, Dispatch)]
    assert all(isinstance(order, CancelWork) and order.void for order in orders)
    # prefill has its KV, and decode the work if the last router has handed it over
    assert sorted(order.worker_id for order in orders) == ["d0", "p0"]
    assert [e.outcome.kind for e in effects if isinstance(e, End)] == [OutcomeKind.FAILED]


@pytest.mark.parametrize("breaks", [break_placement, break_learning])
def test_router_blames_no_request_for_failure_without_one(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    breaks(monkeypatch)
    router = Router(ROUTER, RouterSettings())
    with pytest.raises(AssertionError):
        for _ in range(2):
            router.apply(PartitionTaken(PARTITION), T0)
            router.apply(PartitionReady(PARTITION), T0)
    assert router.blame(T0) == []


def searches(on: RouterHarness) -> None:
    on.request("bad", retrieval=builders.retrieval(probing=builders.probing()))


def answers_and_searches(on: RouterHarness) -> None:
    searches(on)
    on.retrieved("bad")


def is_given_up(on: RouterHarness) -> None:
    on.request("bad")
    on.phase(on.works[-1], PhaseKind.FAILED)


def is_read(on: RouterHarness) -> None:
    gateway = on.gateway("gateway-a")
    on.asked_at(gateway, "bad")
    gateway.silent = True


def read_to_its_end(on: RouterHarness) -> None:
    end = stream_end("bad", ["a"], attempt=1)
    on.record(ContinuedArrived(builders.continued("bad", 1, end=end), PARTITION))


@pytest.mark.parametrize(
    ("before", "broken", "then"),
    [
        (lambda on: None, (RouterTables, "enqueue"), lambda on: on.request("bad")),
        (lambda on: on.request("bad"), (Attempts, "cancel"), lambda on: on.cancel("bad")),
        (
            lambda on: on.request("bad"),
            (Attempts, "handle_worker_loss"),
            lambda on: on.worker(on.works[-1].worker_id, Role.REPLICA),
        ),
        (is_given_up, (Attempts, "handle_timeout"), lambda on: on.pass_ms(10_000)),
        (is_read, (Endings, "end_cancelled"), lambda on: on.pass_ms(60_000)),
        (searches, (Retrievals, "apply_retrieved"), lambda on: on.retrieved("bad")),
        (
            answers_and_searches,
            (router_module, "with_probe"),
            lambda on: on.probed(on.works[0], 1, builders.passage(3)),
        ),
        (
            is_given_up,
            (Endings, "apply_continued"),
            lambda on: on.report_progress("bad", 1, 901),
        ),
        (is_given_up, (Endings, "end_as_read"), read_to_its_end),
        (
            answers_and_searches,
            (Endings, "end_by_worker"),
            lambda on: on.outcome(on.works[0]),
        ),
    ],
    ids=[
        "arrived",
        "cancelled",
        "lost",
        "overdue",
        "unread",
        "retrieved",
        "probed",
        "continued",
        "read",
        "outcome",
    ],
)
def test_router_blames_request_whatever_record_it_fails_at(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[RouterHarness], None],
    broken: tuple[Any, str],
    then: Callable[[RouterHarness], None],
) -> None:
    on = replicas(2, says_at_once=False)
    before(on)

    def breaks(*_: Any) -> None:
        raise Poisoned

    monkeypatch.setattr(*broken, breaks)
    with pytest.raises(Poisoned):
        then(on)
    assert blamed(on.router.blame(on.now_ms)) == ["bad"]
