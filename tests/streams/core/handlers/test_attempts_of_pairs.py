"""Attempts that a prefill and a decode worker hold together, state by state."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.fleet import LEASE_MS
from schemas.records import (
    DecisionKind,
    MemberState,
    Mode,
    Orchestration,
    OutcomeKind,
    PhaseKind,
    Reason,
    Role,
    WireError,
    WorkPhase,
)
from streams.core.states import State
from tests.streams import builders
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import brought_to, pairs, running, state_of, work_of

PREFILL_FIRST = Orchestration.PREFILL_FIRST
DECODE_FIRST = Orchestration.DECODE_FIRST
CONCURRENT = Orchestration.CONCURRENT
FATAL = WireError(code="invalid_request", message="no", retriable=False)

# Every stage in which workers hold an attempt, and which of them do.
STAGES: list[tuple[Orchestration, str, tuple[str, ...]]] = [
    (PREFILL_FIRST, "prefilling", ("p0",)),
    (PREFILL_FIRST, "decoding", ("d0",)),
    (DECODE_FIRST, "allocating", ("d0",)),
    (DECODE_FIRST, "paired", ("p0", "d0")),
    (DECODE_FIRST, "received", ("p0", "d0")),
    (DECODE_FIRST, "decoding", ("d0",)),
    (CONCURRENT, "paired", ("p0", "d0")),
    (CONCURRENT, "received", ("p0", "d0")),
    (CONCURRENT, "decoding", ("d0",)),
]
HOLDERS = [(o, stage, who) for o, stage, workers in STAGES for who in workers]
NAMES = [f"{o.value}-{stage}-{who}" for o, stage, who in HOLDERS]
by_holder = pytest.mark.parametrize(("orchestration", "stage", "who"), HOLDERS, ids=NAMES)
by_stage = pytest.mark.parametrize(
    ("orchestration", "stage", "workers"), STAGES, ids=[f"{o.value}-{s}" for o, s, _ in STAGES]
)
both_pairs = pytest.mark.parametrize("orchestration", [CONCURRENT, DECODE_FIRST])


def cancels(on: RouterHarness) -> list[tuple[str, bool]]:
    return [(cancel.worker_id, cancel.void) for cancel in on.cancels]


def work_on(on: RouterHarness, who: str) -> Any:
    return work_of(on, WorkPhase.PREFILL if who.startswith("p") else WorkPhase.DECODE)


def expected_voids(orchestration: Orchestration, stage: str, who: str) -> list[tuple[str, bool]]:
    """Who is told to drop the attempt when `who` gave it up."""
    if (orchestration, stage) == (PREFILL_FIRST, "decoding"):
        return [("p0", True)]  # it keeps the KV
    holders = next(w for o, s, w in STAGES if (o, s) == (orchestration, stage))
    return [(worker, True) for worker in holders if worker != who]


def is_spare(stage: str, who: str) -> bool:
    return stage == "received" and who == "p0"


def test_concurrent_pair_dispatches_both_sides_at_once() -> None:
    on = pairs(CONCURRENT)
    on.request("r1", tokens=40)
    decode, prefill = on.works
    assert (decode.phase, prefill.phase) == (WorkPhase.DECODE, WorkPhase.PREFILL)
    for work in on.works:
        assert (work.mode, work.orchestration) == (Mode.REMOTE, CONCURRENT)
        assert (work.attempt, work.first_seq, work.prefill_worker) == (1, 0, "p0")
    deadline_ms = on.accepted["r1"].deadline_ms
    assert decode.kv is not None and prefill.kv_target is not None
    assert (decode.kv.worker_id, decode.kv.worker_epoch) == ("p0", 1)
    assert (decode.kv.engine_id, decode.kv.engine_request_id) == ("engine-p0", "r1.1")
    assert (decode.kv.tokens, decode.kv.block_size, decode.kv.block_ids) == (40, 16, ())
    assert decode.kv.expires_at_ms == prefill.kv_target.expires_at_ms == deadline_ms
    target = prefill.kv_target
    assert (target.worker_id, target.engine_id, target.tokens) == ("d0", "engine-d0", 0)
    assert (target.engine_request_id, target.block_ids, prefill.kv) == ("r1.1", (), None)
    (decision,) = on.decisions
    assert (decision.orchestration, decision.decode_worker) == (CONCURRENT, "d0")
    assert running(on) == {"p0": 1, "d0": 1}


def test_decode_first_pair_dispatches_prefill_after_allocation() -> None:
    on = pairs(DECODE_FIRST)
    on.request("r1", tokens=40)
    (decode,) = on.works
    assert (decode.phase, decode.orchestration) == (WorkPhase.DECODE, DECODE_FIRST)
    assert decode.kv is not None and decode.kv.worker_id == "p0"
    assert running(on) == {"p0": 1, "d0": 1}
    room = replace(builders.handle(decode, on.now_ms + 9_000), tokens=16, block_ids=(4, 5, 6))
    on.phase(decode, PhaseKind.KV_ALLOCATED, kv=room)
    prefill = on.works[-1]
    assert (prefill.phase, prefill.worker_id) == (WorkPhase.PREFILL, "p0")
    assert (prefill.kv, prefill.kv_target) == (None, room)
    on.phase(decode, PhaseKind.KV_ALLOCATED, kv=room)
    assert len(on.works) == 2


@both_pairs
@pytest.mark.parametrize("received_first", [False, True])
def test_decode_worker_ends_request_of_pair(
    orchestration: Orchestration, received_first: bool
) -> None:
    on = pairs(orchestration)
    brought_to(on, "received" if received_first else "paired")
    prefill, decode = work_of(on, WorkPhase.PREFILL), work_of(on, WorkPhase.DECODE)
    assert state_of(on, "r1") is (State.RECEIVED if received_first else State.PAIRED)
    on.phase(prefill, PhaseKind.PREFILL_DONE, cached_tokens=3)
    assert state_of(on, "r1") is State.DECODING
    assert running(on) == {"p0": 0, "d0": 1}
    assert len(on.works) == 2 and not on.cancels
    if not received_first:
        on.phase(decode, PhaseKind.KV_RECEIVED)
    on.phase(prefill, PhaseKind.PREFILL_DONE)  # repeated
    on.outcome(decode)
    assert not on.router.view() and not on.cancels
    assert running(on) == {"p0": 0, "d0": 0}


@both_pairs
def test_pair_needs_no_prefill_after_decode_computes_prompt(
    orchestration: Orchestration,
) -> None:
    on = pairs(orchestration)
    brought_to(on, "paired")
    prefill, decode = work_of(on, WorkPhase.PREFILL), work_of(on, WorkPhase.DECODE)
    on.phase(decode, PhaseKind.KV_MISSED)
    assert on.decisions[-1].kind is DecisionKind.COMPUTE
    on.phase(prefill, PhaseKind.FAILED)
    assert state_of(on, "r1") is State.DECODING
    on.outcome(decode)
    assert not on.router.view()


def test_decode_outcome_before_prefill_frees_prefill_worker() -> None:
    on = pairs(CONCURRENT)
    brought_to(on, "paired")
    on.outcome(work_of(on, WorkPhase.DECODE))
    assert cancels(on) == [("p0", True)]
    assert running(on) == {"p0": 0, "d0": 0}


@by_holder
@pytest.mark.parametrize("kind", [PhaseKind.FAILED, PhaseKind.REFUSED])
def test_pair_side_failure_voids_other_side_and_places_again(
    orchestration: Orchestration, stage: str, who: str, kind: PhaseKind
) -> None:
    on = pairs(orchestration, 2, 2)
    brought_to(on, stage)
    on.phase(work_on(on, who), kind)
    if is_spare(stage, who):
        assert state_of(on, "r1") is State.DECODING and not on.cancels
        assert running(on) == {"p0": 0, "p1": 0, "d0": 1, "d1": 0}
        return
    assert cancels(on) == expected_voids(orchestration, stage, who)
    last = on.decisions[-1]
    assert (last.kind, last.attempt) == (DecisionKind.REPLACE, 2)
    peer = orchestration is not PREFILL_FIRST and who == "p0"
    failed = Reason.PEER_FAILED if peer else Reason.WORKER_FAILED
    assert last.reason is (Reason.WORKER_REFUSED if kind is PhaseKind.REFUSED else failed)
    assert on.works[-1].attempt == 2
    assert sum(running(on).values()) == (1 if orchestration is PREFILL_FIRST else 2)


@by_holder
def test_non_retriable_error_ends_request_on_both_sides(
    orchestration: Orchestration, stage: str, who: str
) -> None:
    on = pairs(orchestration)
    brought_to(on, stage)
    on.phase(work_on(on, who), PhaseKind.FAILED, error=FATAL)
    if is_spare(stage, who):
        assert state_of(on, "r1") is State.DECODING
        return
    assert (on.outcomes["r1"].kind, on.outcomes["r1"].error) == (OutcomeKind.FAILED, FATAL)
    assert on.outcomes["r1"].orchestration is orchestration
    assert cancels(on) == expected_voids(orchestration, stage, who)
    assert running(on) == {"p0": 0, "d0": 0}


@by_holder
@pytest.mark.parametrize("how", ["epoch", "silent"])
def test_pair_side_loss_voids_other_side(
    orchestration: Orchestration, stage: str, who: str, how: str
) -> None:
    on = pairs(orchestration, 2, 2)
    brought_to(on, stage)
    if how == "epoch":
        on.worker(who, on.workers[who].role, window=4)
    else:
        on.workers[who].silent = True
        on.pass_ms(LEASE_MS + 500)
    if is_spare(stage, who):
        assert state_of(on, "r1") is State.DECODING and not on.cancels
        on.outcome(work_of(on, WorkPhase.DECODE))
        assert not on.router.view()
        return
    assert cancels(on) == expected_voids(orchestration, stage, who)
    assert on.decisions[-1].reason is Reason.WORKER_LOST
    assert on.works[-1].attempt == 2


def test_prefill_worker_loss_before_its_dispatch_voids_allocation() -> None:
    on = pairs(DECODE_FIRST, 2)
    brought_to(on, "allocating")
    on.worker("p0", Role.PREFILL, window=4)
    assert cancels(on) == [("d0", True)]
    assert on.works[-1].attempt == 2


def test_router_voids_allocation_for_silent_prefill_worker() -> None:
    on = pairs(DECODE_FIRST, 2)
    brought_to(on, "allocating")
    on.workers["p0"].silent = True
    on.pass_ms(LEASE_MS)
    on.now_ms += 1  # nothing from the fleet since
    on.phase(on.works[0], PhaseKind.KV_ALLOCATED)
    assert all(work.phase is not WorkPhase.PREFILL for work in on.works)
    assert cancels(on) == [("d0", True)]


def test_draining_prefill_worker_gets_work_and_refuses() -> None:
    on = pairs(DECODE_FIRST, 2)
    brought_to(on, "allocating")
    on.workers["p0"].state = MemberState.DRAINING
    on.beat(on.workers["p0"])
    on.phase(on.works[0], PhaseKind.KV_ALLOCATED)
    on.phase(work_of(on, WorkPhase.PREFILL), PhaseKind.REFUSED)
    assert on.works[-1].attempt == 2
    assert on.works[-1].prefill_worker == "p1"


@by_stage
@pytest.mark.parametrize("end", ["outcome", "failed", "lost", "overdue"])
def test_cancellation_goes_to_worker_that_ends_request(
    orchestration: Orchestration, stage: str, workers: tuple[str, ...], end: str
) -> None:
    on = pairs(orchestration)
    brought_to(on, stage)
    ender = workers[-1]
    on.cancel("r1")
    voids = expected_voids(orchestration, stage, ender)
    assert sorted(cancels(on)) == sorted([(ender, False), *voids])
    assert state_of(on, "r1") is State.CANCELLING
    assert running(on) == {"p0": 0, "d0": 0, ender: 1}
    for work in list(on.works):  # what was on its way means nothing
        if work.worker_id != ender:
            on.phase(work, PhaseKind.FAILED)
        elif stage == "allocating":
            on.phase(work, PhaseKind.KV_ALLOCATED)
    assert state_of(on, "r1") is State.CANCELLING
    assert on.rebuilt().view() == on.router.view()
    if end == "outcome":
        on.outcome(work_on(on, ender), kind=OutcomeKind.CANCELLED)
    elif end == "failed":
        on.phase(work_on(on, ender), PhaseKind.FAILED)
    elif end == "lost":
        on.worker(ender, on.workers[ender].role)
    else:
        on.pass_ms(60_000 + 5_500)
        assert (ender, True) in cancels(on)
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED
    assert not on.router.view()
    assert running(on) == {"p0": 0, "d0": 0}


@by_stage
def test_router_expires_pair_after_grace_beyond_deadline(
    orchestration: Orchestration, stage: str, workers: tuple[str, ...]
) -> None:
    on = pairs(orchestration)
    brought_to(on, stage, deadline_ms=on.now_ms + 1_000)
    on.pass_ms(1_500)
    assert state_of(on, "r1") and not on.cancels
    on.pass_ms(5_000)
    assert on.outcomes["r1"].kind is OutcomeKind.EXPIRED
    kv_voids = [("p0", True)] if (orchestration, stage) == (PREFILL_FIRST, "decoding") else []
    assert sorted(cancels(on)) == sorted([*((worker, True) for worker in workers), *kv_voids])
    assert running(on) == {"p0": 0, "d0": 0}


@by_stage
def test_takeover_sends_unproven_work_of_pair_again(
    orchestration: Orchestration, stage: str, workers: tuple[str, ...]
) -> None:
    on = pairs(orchestration)
    brought_to(on, stage)
    assert on.rebuilt().view() == on.router.view()
    before = len(on.works)
    on.taken_over()
    assert on.router.view() == on.rebuilt().view()
    repeats = on.works[before:]
    proven = {"received": ("p0", "d0"), "decoding": ("p0", "d0"), "paired": ("d0",)}
    known_workers = () if orchestration is PREFILL_FIRST else proven.get(stage, ())
    if (orchestration, stage) == (CONCURRENT, "paired"):
        known_workers = ()
    assert sorted(w.worker_id for w in repeats) == sorted(set(workers) - set(known_workers))
    works_by_key = {(w.worker_id, w.attempt): w for w in on.works[:before]}
    for work in repeats:
        first = works_by_key[work.worker_id, work.attempt]
        assert work == replace(first, dispatched_ms=work.dispatched_ms)


@both_pairs
def test_rebuild_restores_void_attempt_of_pair(orchestration: Orchestration) -> None:
    """The prefill worker had ended its part; the router read first that it restarted."""
    on = pairs(orchestration)
    brought_to(on, "paired")
    work = work_of(on, WorkPhase.PREFILL)
    on.worker("p0", Role.PREFILL, window=0)
    last = on.decisions[-1]
    assert (last.kind, last.reason) == (DecisionKind.VOID, Reason.WORKER_LOST)
    assert cancels(on) == [("d0", True)]
    on.phase(work, PhaseKind.PREFILL_DONE)
    on.taken_over()
    assert state_of(on, "r1") is State.QUEUED
    on.workers["p0"].window = 1
    on.beat(on.workers["p0"])
    assert on.attempts == {"r1": 2}


@both_pairs
def test_void_attempt_outcome_ends_request_only_while_queued(
    orchestration: Orchestration,
) -> None:
    on = pairs(orchestration, 1, 2)
    for request_id in ("waits", "placed"):
        on.request(request_id)
        if orchestration is DECODE_FIRST:
            on.phase(work_of(on, WorkPhase.DECODE, request_id), PhaseKind.KV_ALLOCATED)
    works = {work.request_id: work for work in on.works if work.phase is WorkPhase.DECODE}
    on.phase(work_of(on, WorkPhase.PREFILL, "placed"), PhaseKind.FAILED)
    on.workers["p0"].window = 0
    on.beat(on.workers["p0"])
    on.phase(work_of(on, WorkPhase.PREFILL, "waits"), PhaseKind.FAILED)
    assert state_of(on, "waits") is State.QUEUED
    assert on.attempts == {"waits": 1, "placed": 2}
    for request_id in ("waits", "placed"):
        on.outcome(works[request_id])
    assert set(on.outcomes) == {"waits"}  # the client of the other follows attempt 2
    assert set(on.router.view()) == {"placed"}
    assert on.rebuilt().view() == on.router.view()


@both_pairs
def test_one_token_answer_needs_no_pair(orchestration: Orchestration) -> None:
    on = pairs(orchestration)
    on.request("r1", sampling=replace(builders.request().sampling, max_tokens=1))
    assert on.works[0].orchestration is PREFILL_FIRST


def test_pair_ignores_stale_phases() -> None:
    on = pairs(DECODE_FIRST, 2, 2)
    brought_to(on, "paired")
    old = list(on.works)
    on.phase(old[-1], PhaseKind.FAILED)
    brought = on.router.view()
    for work in old:
        for kind in (PhaseKind.KV_ALLOCATED, PhaseKind.PREFILL_DONE, PhaseKind.FAILED):
            on.phase(work, kind, started_ms=on.now_ms)
    assert on.router.view() == brought
    on.phase(on.works[-1], PhaseKind.KV_ALLOCATED, kv=None)  # says nothing
    assert on.router.view() == brought
