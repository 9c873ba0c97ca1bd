"""Takeovers after decisions that did not reach the log, and which of several ends counts."""

from itertools import permutations

import pytest

from schemas.records import CancelWork, DecisionKind, OutcomeKind, PhaseKind, Reason, Work
from schemas.rules.outcomes import counting_outcome, outcome_key
from schemas.topics import TOPICS
from streams.core.effects import Dispatch, RecordUsage
from streams.core.events import (
    CancellationArrived,
    DecisionLoaded,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    Tick,
)
from streams.core.handlers import endings
from streams.core.handlers.endings import DEADLINE_GRACE_MS
from tests.streams import builders
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas, split, state_of


def forget(on: RouterHarness, kind: DecisionKind) -> Work:
    """The last decision did not reach the log, the work that followed from it did, and another
    router takes over. Returns that work."""
    unheard = on.works[-1]
    on.log = [e for e in on.log if not (isinstance(e, DecisionLoaded) and e.decision.kind is kind)]
    on.workers[unheard.worker_id].holds.clear()
    on.taken_over()
    return unheard


def test_work_without_decision_shares_its_attempt_with_no_other() -> None:
    """The attempt tells a second execution from the first."""
    on = replicas(2)
    on.request("r1")
    unheard = forget(on, DecisionKind.PLACE)
    assert [work.attempt for work in on.works] == [1, 2]
    on.record(OutcomeArrived(builders.outcome(unheard, on.now_ms), 0))
    assert state_of(on, "r1").value == "decoding"  # the first one's end is no end any more
    on.taken_over()  # the second one's decision was in the log before its work
    assert on.works[-1] == on.works[-2]
    on.outcome(on.works[-1])
    assert not on.router.view() and not on.rebuilt().view()


def test_outcome_of_work_without_decision_counts_while_none_is_placed() -> None:
    on = replicas(1)
    on.request("r1")
    on.workers["x0"].window = 0
    on.beat(on.workers["x0"])
    unheard = forget(on, DecisionKind.PLACE)
    assert state_of(on, "r1").value == "queued"
    on.outcome(unheard)
    assert not on.router.view() and not on.rebuilt().view()


def test_handover_without_decision_is_repeated_as_new_attempt() -> None:
    """Two decode workers of one attempt could not be told apart."""
    on = split(decodes=2)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    forget(on, DecisionKind.HANDOFF)
    assert [(work.attempt, work.phase.value) for work in on.works] == [
        *((1, "prefill"), (1, "decode"), (2, "prefill")),
    ]
    assert on.decisions[-1].reason is Reason.ROUTER_RESTARTED
    on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    assert on.works[-1].attempt == 2  # and is handed over by the router that placed it


def test_takeover_drops_handover_without_decision() -> None:
    """Once a worker computed to its end an answer that was cancelled."""
    on = split(decodes=1)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    given_up = builders.cancellation("r1", at_ms=on.now_ms)
    on.log.append(CancellationArrived(given_up, 0))  # read by the next router only
    unheard = forget(on, DecisionKind.HANDOFF)
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    drop = on.cancels[-1]
    assert (drop.worker_id, drop.attempt, drop.void) == (unheard.worker_id, unheard.attempt, True)


def test_router_restarts_use_up_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "ATTEMPTS_MAX", 2)
    on = replicas(1)
    on.request("r1")
    forget(on, DecisionKind.PLACE)
    on.phase(on.works[-1], PhaseKind.FAILED)
    assert "r1" not in on.outcomes
    on.taken_over()
    on.beat(on.workers["x0"])
    on.phase(on.works[-1], PhaseKind.FAILED)
    assert on.outcomes["r1"].kind is OutcomeKind.FAILED


def test_handovers_without_decision_use_up_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the router that gives them up and for the next one."""
    monkeypatch.setattr(endings, "ATTEMPTS_MAX", 2)
    on = split(decodes=2)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    forget(on, DecisionKind.HANDOFF)
    assert on.decisions[-1].reason is Reason.ROUTER_RESTARTED
    on.taken_over()
    on.beat(on.workers["p0"])
    on.phase(on.works[-1], PhaseKind.FAILED)
    assert "r1" not in on.outcomes
    on.phase(on.works[-1], PhaseKind.FAILED)
    assert on.outcomes["r1"].kind is OutcomeKind.FAILED


def test_counting_outcome_depends_on_records_alone() -> None:
    """It is the same for the router, a rebuild, an audit and a compacted topic."""
    on = replicas(2)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.FAILED)
    first, second = (builders.outcome(work, on.now_ms) for work in on.works)
    on.record(OutcomeArrived(first, 0))
    assert state_of(on, "r1").value == "decoding"
    on.outcome(on.works[1])
    for order in permutations((first, second)):
        assert counting_outcome(order) == second
        compacted = {outcome_key(outcome): outcome for outcome in (*order, first)}
        assert counting_outcome(compacted.values()) == second
    assert TOPICS["outcomes"].key == "attempt" and counting_outcome(()) is None


def test_router_outcome_outranks_late_outcome_of_worker() -> None:
    on = replicas(1)
    on.request("r1", deadline_ms=on.now_ms + 100)
    on.pass_ms(DEADLINE_GRACE_MS)
    on.now_ms += 150
    on.apply(Tick())
    outcome = on.outcomes["r1"]
    late = builders.outcome(on.works[0], on.now_ms)
    on.record(OutcomeArrived(late, 0))
    assert (outcome.kind, outcome.attempt) == (OutcomeKind.EXPIRED, 2)
    assert outcome_key(outcome) != outcome_key(late)
    assert counting_outcome((late, outcome)) is counting_outcome((outcome, late)) is outcome
    assert not on.rebuilt().view()


def test_outcome_of_last_router_makes_worker_drop_work() -> None:
    on = replicas(1)
    on.request("r1")
    end = builders.outcome(on.works[0], on.now_ms, attempt=2, kind=OutcomeKind.CANCELLED)
    order, used = on.record(OutcomeArrived(end, 0))
    assert isinstance(used, RecordUsage) and used.usage.attempt == 2
    assert isinstance(order, Dispatch) and isinstance(order.record, CancelWork)
    assert order.record.void
    assert not on.router.view()


def test_rebuild_takes_first_of_requests_with_same_id() -> None:
    on = replicas(1)
    on.request("r1", tokens=10)
    on.request("r1", tokens=20)
    assert on.rebuilt().view() == on.router.view()


def test_router_ignores_lost_partition_until_rebuild() -> None:
    """This holds where the partition is lost before it was rebuilt, too."""
    on = replicas()
    on.cancel("r3")  # before it arrives
    on.apply(PartitionLost(PARTITION))
    assert on.request("r1") == [] and not on.router.owned
    on.apply(PartitionTaken(PARTITION))
    on.request("r2")
    on.apply(PartitionLost(PARTITION))
    for event in (PartitionTaken(PARTITION), PartitionReady(PARTITION)):
        on.apply(event)
    assert on.router.view() == {} and on.router.rebuilt == {PARTITION}
    on.request("r3")
    assert [work.request_id for work in on.works] == ["r3"]


def test_rebuild_counts_latest_void_attempt_in_any_order() -> None:
    """A router that was replaced may write its decision behind the next one's."""
    on = replicas(2, continues=False)
    on.request("r1")
    for _ in range(2):
        on.phase(on.works[-1], PhaseKind.FAILED)
    voids = [
        index
        for index, event in enumerate(on.log)
        if isinstance(event, DecisionLoaded) and event.decision.kind is DecisionKind.VOID
    ]
    first, second = voids
    on.log[first], on.log[second] = on.log[second], on.log[first]
    assert on.rebuilt().view() == on.router.view()
