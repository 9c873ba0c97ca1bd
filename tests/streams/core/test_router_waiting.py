"""What waits at a router, and what it looks at now and then."""

import pytest

from schemas.records import OutcomeKind, Role, Work
from streams.config import RouterSettings
from streams.core.effects import Dispatch
from streams.core.events import (
    FleetRecordArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    RequestArrived,
    Tick,
)
from streams.core.handlers.endings import DEADLINE_GRACE_MS
from streams.core.router import Router
from streams.core.states import State
from streams.core.tables import RouterTables
from tests.streams import builders
from tests.streams.builders import ROUTER, T0
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import replicas, state_of


def test_partition_loss_frees_credit_for_other_partition() -> None:
    router = Router(ROUTER, RouterSettings(policy="static"))
    fleet = builders.registration("x0", Role.REPLICA), builders.beat("x0", 1, {Role.REPLICA: 1})
    partition_events = [
        kind(number) for number in (0, 1) for kind in (PartitionTaken, PartitionReady)
    ]
    requests = [RequestArrived(builders.request(f"r{number}"), number) for number in (0, 1)]
    for event in (
        *(FleetRecordArrived(record, 0) for record in fleet),
        *partition_events,
        *requests,
    ):
        effects = router.apply(event, T0)
    assert not any(isinstance(effect, Dispatch) for effect in effects), "the only credit is taken"
    effects = router.apply(PartitionLost(0), T0 + 5)
    (work,) = [effect.record for effect in effects if isinstance(effect, Dispatch)]
    assert isinstance(work, Work) and (work.request_id, work.dispatched_ms) == ("r1", T0 + 5)


def test_cancellation_leaves_other_queued_requests() -> None:
    on = replicas(window=1)
    for number in range(3):
        on.request(f"r{number}")
    on.cancel("r1")
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    assert state_of(on, "r2") is State.QUEUED
    on.outcome(on.works[0])
    assert on.works[-1].request_id == "r2"


def test_router_sweeps_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    on, sweep, swept = replicas(), RouterTables.sweep, list[int]()

    def note(tables: RouterTables, now_ms: int) -> None:
        swept.append(now_ms)
        sweep(tables, now_ms)

    monkeypatch.setattr(RouterTables, "sweep", note)
    begun_ms = on.now_ms
    for _ in range(8):
        on.now_ms += 500
        on.apply(Tick())
    assert sorted({at_ms - begun_ms for at_ms in swept}) == [1_000, 2_000, 3_000, 4_000]


def test_partition_loss_frees_credits() -> None:
    on = replicas(window=1)
    on.request("r1")
    on.request("r2")
    on.cancel("r9")
    on.apply(PartitionLost(PARTITION))
    assert not on.router.view()
    assert on.router.tables.fleet.of("tiny").pools[Role.REPLICA].workers[0].running == 0
    assert len(on.router.tables.queues.of("tiny").admission) == 0


def test_router_remembers_ended_request_after_takeover() -> None:
    on = replicas()
    on.request("r1", deadline_ms=on.now_ms + 5_000)
    on.outcome(on.works[0])
    repeat = RequestArrived(on.accepted["r1"], PARTITION)
    on.taken_over()
    on.pass_ms(5_000 + DEADLINE_GRACE_MS // 2)
    assert on.apply(repeat) == [] and "r1" in on.router.tables.ended_ids
    on.apply(PartitionLost(PARTITION))
    assert "r1" not in on.router.tables.ended_ids


def test_takeover_remembers_early_cancellation() -> None:
    on = replicas()
    on.cancel("r1")
    on.taken_over()
    on.pass_ms(1_500)
    on.request("r1")
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED and not on.works
    on.cancel("r2")
    on.taken_over()
    for event in (PartitionLost(PARTITION), PartitionTaken(PARTITION), PartitionReady(PARTITION)):
        on.apply(event)
    on.request("r2")
    assert on.works[-1].request_id == "r2", "of another time"
