"""The router under random events, against independent books: the invariants of the design."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import (
    CancelReason,
    MemberState,
    Orchestration,
    OutcomeKind,
    PhaseKind,
    Priority,
    Reason,
    Retrieval,
    Role,
    WireError,
    Work,
)
from streams.config import POLICIES
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
)
from streams.core.states import State
from tests.streams import builders
from tests.streams.builders import ALL, handle, passage, retrieval
from tests.streams.core.hand_played import HandPlayedGateway, key_of
from tests.streams.core.router_harness import PARTITION, RouterHarness

FLEETS = {
    "split": (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)),
    "replicas": (("x0", Role.REPLICA), ("x1", Role.REPLICA)),
    "mixed": (("p0", Role.PREFILL), ("d0", Role.DECODE), ("x0", Role.REPLICA)),
    "few": (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)),
    "models": (
        *(("p0", Role.PREFILL), ("d0", Role.DECODE)),
        *(("x0", Role.REPLICA), ("p1", Role.PREFILL), ("d1", Role.DECODE)),
    ),
}
OF_SECOND_MODEL = ("x0", "p1", "d1")  # in that fleet
PRIORITIES = list(Priority)
GATEWAYS = ("g0", "g1")
GRACE_MS = 1_500
LOG_ORDER = (
    *(OutcomeArrived, DecisionLoaded, PhaseArrived, RetrievedArrived, ContinuedArrived),
    (ResumptionArrived, CancellationArrived),  # on one topic
    RequestArrived,
)
FATAL = WireError(code="invalid_request", message="no", retriable=False)


def arrive(on: RouterHarness, a: int, b: int) -> None:
    request_id = f"r{len(on.accepted):03}"
    accepted: dict[str, Any] = {}
    if a % 4:  # else an older gateway
        gateway = a_gateway(on, a)
        accepted = {"gateway_id": gateway.gateway_id, "gateway_started_ms": gateway.started_ms}
    models = sorted({worker.model for worker in on.workers.values()})
    model = models[b % len(models)]
    on.request(
        request_id,
        **accepted,
        model=model,
        adapter="law" if model == "other" and a % 3 else "",
        keeps_running=b % 5 == 0,
        tokens=1 + a,
        priority=PRIORITIES[b % 3],
        session_id=f"s{a % 5}",
        deadline_ms=on.now_ms + 500 + 400 * b,
        retrieval=a_retrieval(on, a, b) if a % 3 == 0 else None,
    )


def a_retrieval(on: RouterHarness, a: int, b: int) -> Retrieval:
    """Some are late before they begin; the tokens of all prompts are alike, as a session's are."""
    by_ms, probing = on.now_ms + 100 * (b % 9) - 50, builders.probing() if a % 2 else None
    return retrieval(by_ms, history_tokens=a, at=a, tail_at=a, probing=probing)


def answer(on: RouterHarness, a: int, b: int) -> None:
    """Something is found for one of the requests, or not, or it is the second answer."""
    if on.asks:
        request_id = on.asks[-1 - a % min(4, len(on.asks))].request.request_id
        passages = [passage(number, 1 + b) for number in range(1, 2 + a % 3)]
        if b % 4:
            on.retrieved(request_id, *passages)
        else:
            on.retrieved(request_id, error=FATAL)


def probe(on: RouterHarness, a: int, b: int) -> None:
    """A worker writes what became of a probe of some answer, in turn or not, late or not."""
    works = [work for work in on.works if work.probes is not None]
    if works:
        work = works[-1 - a % min(4, len(works))]
        assert work.probes is not None
        passages = [passage(1 + b)] * (b % 3 > 0)
        on.probed(work, work.probes.decided + 1 + b % 4 - (b % 7 == 0), *passages)


def say(on: RouterHarness, a: int, b: int) -> None:
    """A gateway says how much there is of an answer, in time or late, or says it twice."""
    if on.voids:
        void = on.voids[-1 - a % min(4, len(on.voids))]
        on.report_progress(void.request_id, void.attempt, *range(b % 20), chars=b)


def read(on: RouterHarness, a: int, b: int) -> None:
    on.read()


def a_gateway(on: RouterHarness, a: int) -> HandPlayedGateway:
    """One of those that were ever started, alive or not."""
    name = GATEWAYS[a % len(GATEWAYS)]
    return on.gateways.get(name) or on.gateway(name)


def lose_gateway(on: RouterHarness, a: int, b: int) -> None:
    """It falls silent, or another process or epoch has its name."""
    gateway = a_gateway(on, a)
    gateway.silent = True
    if b % 3:
        on.gateway(gateway.gateway_id, same_process=b % 3 == 1)


def resume(on: RouterHarness, a: int, b: int) -> None:
    """Of a request that was there: its client has an event."""
    if on.accepted:
        on.resume(f"r{(a + b) % len(on.accepted):03}", a_gateway(on, a))


def cancel(on: RouterHarness, a: int, b: int) -> None:
    reason = CancelReason.CLIENT_GONE if b % 2 else CancelReason.CLIENT_REQUEST
    on.cancel(f"r{(a + b) % (len(on.accepted) + 2):03}", reason=reason)


def progress(on: RouterHarness, a: int, b: int) -> None:
    """A worker does the next thing with one of its requests."""
    works = on.work_in_flight()
    if works:
        advance(on, works[a % len(works)], b)


def advance(on: RouterHarness, work: Work, b: int) -> None:
    """Prefill ends; decode makes room first, if that is its part, then receives, then ends."""
    worker = on.workers[work.worker_id]
    paired = work.orchestration in (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)
    if worker.role is Role.PREFILL:
        kv = None if paired else handle(work, on.now_ms + 1_000 + 200 * b)
        on.phase(work, PhaseKind.PREFILL_DONE, kv=kv)
    elif work.orchestration is Orchestration.DECODE_FIRST and key_of(work) not in worker.allocated:
        on.phase(work, PhaseKind.KV_ALLOCATED)
    elif b % 3 == 0:
        on.phase(work, PhaseKind.KV_MISSED if b % 2 else PhaseKind.KV_RECEIVED)
    else:
        on.outcome(work, kv=handle(work, on.now_ms + 60_000) if b % 2 else None)


def break_down(on: RouterHarness, a: int, b: int) -> None:
    works = on.work_in_flight()
    if works:
        kind = PhaseKind.REFUSED if b % 2 else PhaseKind.FAILED
        changes = {"error": FATAL} if b % 7 == 0 else {}
        on.phase(works[a % len(works)], kind, **changes)


def repeat(on: RouterHarness, a: int, b: int) -> None:
    """A record comes twice; a request only while its id is remembered, up to its deadline. Of a
    probe that a worker has numbered out of turn the second one counts: it stands in the log.
    """
    records = [e for e in on.log if isinstance(e, LOG_ORDER) and not isinstance(e, DecisionLoaded)]
    records = [
        e for e in records if not isinstance(e, RequestArrived) or e.request.deadline_ms > on.now_ms
    ]
    if records:
        event = records[(a * 31 + b) % len(records)]
        is_probe = isinstance(event, RetrievedArrived) and event.retrieved.probe
        (on.record if is_probe else on.apply)(event)


def stale(on: RouterHarness, a: int, b: int) -> None:
    """Somebody reports work that it holds no longer."""
    if on.works:
        work = on.works[(a * 31 + b) % len(on.works)]
        if key_of(work) not in on.workers[work.worker_id].holds:
            kinds = (PhaseKind.PREFILL_DONE, PhaseKind.FAILED, PhaseKind.KV_ALLOCATED)
            on.phase(work, kinds[b % 3])


def late_outcome(on: RouterHarness, a: int, b: int) -> None:
    """A worker that was told to drop an attempt had ended it before it heard so."""
    if on.works:
        work = on.works[(a * 31 + b) % len(on.works)]
        given_up = key_of(work) not in on.workers[work.worker_id].holds
        if given_up and work.attempt < on.attempts[work.request_id]:
            on.outcome(work)


def fall_silent(on: RouterHarness, a: int, b: int) -> None:
    names = sorted(on.workers)
    on.workers[names[a % len(names)]].silent = True


def start_again(on: RouterHarness, a: int, b: int) -> None:
    names = sorted(on.workers)
    old = on.workers[names[a % len(names)]]
    moves = any(worker.model == "other" for worker in on.workers.values()) and b % 5 == 0
    model = ("tiny", "other")[old.model == "tiny"] if moves else old.model
    on.worker(old.worker_id, old.role, window=b % 4, model=model)


def drain(on: RouterHarness, a: int, b: int) -> None:
    names = sorted(on.workers)
    worker = on.workers[names[a % len(names)]]
    if not worker.silent:
        worker.state = MemberState.DRAINING
        on.beat(worker)


def wait(on: RouterHarness, a: int, b: int) -> None:
    on.pass_ms(1 + 60 * a)


STEPS: dict[str, Callable[[RouterHarness, int, int], None]] = {
    step.__name__: step
    for step in (
        *(arrive, cancel, progress, break_down, repeat, stale, late_outcome),
        *(fall_silent, start_again, drain, wait, lose_gateway, resume, answer, probe, read, say),
    )
}
WEIGHTED = [
    *STEPS,
    *["arrive"] * 4,
    *["progress"] * 8,
    *["answer"] * 2,
    *["probe"] * 2,
    *["say"] * 2,
]


def check_rebuild(on: RouterHarness) -> None:
    """Live state equals what the log tells, in whichever order its topics are read."""
    live = on.router.view()
    for kinds in (LOG_ORDER, LOG_ORDER[::-1]):
        log = [e for kind in kinds for e in on.log if isinstance(e, kind)]
        assert on.rebuilt(log).view() == live


def heal(on: RouterHarness, of_second_model: Sequence[str] = ()) -> None:
    """All workers return with credits, and everything in flight is answered."""
    for worker in list(on.workers.values()):
        model = "other" if worker.worker_id in of_second_model else "tiny"
        on.worker(worker.worker_id, worker.role, window=50, model=model)
    for _ in range(400):
        on.read()
        works = on.work_in_flight()
        if not works and not on.router.tables.requests.by_id:
            return
        for work in works:
            if key_of(work) in on.workers[work.worker_id].holds:
                advance(on, work, 59)
        on.pass_ms(250)
    raise AssertionError(f"still live: {on.router.view()}")


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(FLEETS)),
    st.lists(
        st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 60), st.integers(0, 60)),
        min_size=10,
        max_size=120,
    ),
    st.integers(1, 12),
    st.sampled_from([(), *((o,) for o in ALL), ALL]),
    st.sampled_from(["auto", "decode_first", "concurrent"]),
    st.sampled_from([policy for policy in POLICIES if policy != "table"]),
)
def test_router_keeps_invariants_under_random_events(
    fleet: str,
    steps: list[tuple[str, int, int]],
    queue_max: int,
    can: tuple[Orchestration, ...],
    orchestration: str,
    policy: str,
) -> None:
    on = RouterHarness(
        says_at_once=False,
        gateway_grace_ms=GRACE_MS,
        policy=policy,
        queue_requests_max=queue_max,
        local_after_ms=2_000,
        orchestration=orchestration,
    )
    of_second_model = OF_SECOND_MODEL if fleet == "models" else ()
    for worker_id, role in FLEETS[fleet]:
        model = "other" if worker_id in of_second_model else "tiny"
        on.worker(worker_id, role, can=can, model=model, adapters=("law", "tax"))
    on.pass_ms(250)
    for step, a, b in steps:
        STEPS[step](on, a, b)
    on.pass_ms(50)
    check_rebuild(on)
    heal(on, of_second_model)
    assert set(on.outcomes) == set(on.accepted)
    table, queues = on.router.tables.requests, on.router.tables.queues
    assert not table.by_worker and not table.readers
    for queue in map(queues.of, queues):
        assert not (queue.live or queue.handovers or queue.before_decode or queue.admission)
    for pool in on.router.tables.fleet.of("tiny").pools.values():
        assert all((w.running, w.work_ahead_tokens) == (0, 0) for w in pool.workers)


def test_random_steps_reach_every_kind_of_outcome() -> None:
    """A fixed walk sees all kinds, so that the property above is about something."""
    on = RouterHarness(says_at_once=False, queue_requests_max=4, gateway_grace_ms=GRACE_MS)
    for worker_id, role in FLEETS["split"]:
        on.worker(worker_id, role, window=1)
    on.pass_ms(250)
    names = list(WEIGHTED)
    for number in range(1_500):
        a, b = number * 7 % 61, number * 13 % 59
        STEPS[names[number * 3 % len(names)]](on, a, b)
    heal(on)
    kinds = {outcome.kind for outcome in on.outcomes.values()}
    assert kinds == set(OutcomeKind)
    assert set(on.outcomes) == set(on.accepted)


@pytest.mark.parametrize("orchestration", ["decode_first", "concurrent"])
def test_random_steps_reach_pairs_in_every_state(orchestration: str) -> None:
    """A seeded walk with takeovers meets pairs in all states and with all ends."""
    draw = Random(5)
    on = RouterHarness(
        says_at_once=False,
        queue_requests_max=8,
        orchestration=orchestration,
        gateway_grace_ms=GRACE_MS,
    )
    for worker_id, role in FLEETS["split"]:
        on.worker(worker_id, role, window=3, can=ALL)
    on.pass_ms(250)
    names, states = list(WEIGHTED), set[State]()
    for number in range(1_500):
        STEPS[draw.choice(names)](on, draw.randrange(61), draw.randrange(61))
        states |= {live.state for live in on.router.tables.requests.by_id.values()}
        if number % 100 == 99:
            check_rebuild(on)
            on.taken_over()
        if number % 100 == 49:
            for worker in list(on.workers.values()):
                on.worker(worker.worker_id, worker.role, window=3)
    heal(on)
    assert set(on.outcomes) == set(on.accepted)
    assert states >= {State.PAIRED, State.CANCELLING, State.QUEUED, State.DECODING}
    assert (State.ALLOCATING in states) == (orchestration == "decode_first")
    reasons = {decision.reason for decision in on.decisions}
    assert reasons >= {Reason.WORKER_FAILED, Reason.WORKER_LOST, Reason.WORKER_REFUSED}
    assert Reason.GATEWAY_LOST in reasons
    assert {outcome.kind for outcome in on.outcomes.values()} == set(OutcomeKind)
    assert State.RETRIEVING in states and any(notice.citations for notice in on.notices)
    assert any(ask.history for ask in on.asks), "some turn follows another with passages"
    assert State.CONTINUING in states and any(work.prior_tokens for work in on.works)
    assert any(work.probes and work.probes.inserts for work in on.works), "some answer goes on"


def test_partition_loss_and_takeover_restore_same_state() -> None:
    on = RouterHarness()
    for worker_id, role in FLEETS["split"]:
        on.worker(worker_id, role)
    on.pass_ms(250)
    for number in range(24):
        arrive(on, number, 50)
        if number % 6 == 4:
            answer(on, number, 1)
        if number % 2:
            progress(on, number, number)
    before = on.router.view()
    states = {State.RETRIEVING, State.PREFILLING, State.DECODING, State.QUEUED}
    assert states <= {view[2] for view in before.values()} and on.notices
    past_events = list(on.log)
    for worker in on.workers.values():
        worker.window = 0
        on.beat(worker)
    on.apply(PartitionLost(PARTITION))
    assert not on.router.view()
    on.apply(PartitionTaken(PARTITION))
    for event in past_events:
        assert on.apply(event) == []
    on.apply(PartitionReady(PARTITION))
    assert on.router.view() == before
