"""The router's state machine, case by case."""

from dataclasses import replace

import pytest

from schemas import prefix
from schemas.fleet import LEASE_MS
from schemas.records import (
    CancelReason,
    CancelWork,
    DecisionKind,
    KvEvents,
    KvHandle,
    MemberState,
    Mode,
    OutcomeKind,
    PhaseKind,
    Priority,
    Reason,
    Role,
    Work,
    WorkPhase,
)
from schemas.rules.tokens import token_count
from streams.config import RouterSettings
from streams.core.effects import Dispatch, DropSession, End, SaveSession
from streams.core.events import (
    CancellationArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    RequestArrived,
    SessionLoaded,
    Tick,
)
from streams.core.handlers import endings
from streams.core.placement import placer
from streams.core.router import Router
from streams.core.states import State
from streams.core.tables import EarlyCancellations
from tests.streams import builders
from tests.streams.builders import ROUTER, T0
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas, split, state_of, to_decoding

BLOCKS = prefix.pack(prefix.chain(range(64), 16)[:3])


def test_router_is_idle_without_requests_or_blocks_to_sweep() -> None:
    on = split()
    assert on.router.is_idle
    on.request("r1")
    assert not on.router.is_idle
    on.cancel("r1")
    (work,) = on.works
    on.outcome(work, kind=OutcomeKind.CANCELLED)
    assert on.router.is_idle
    for seq, changes in enumerate(({"snapshot": True, "stored": BLOCKS}, {"removed": BLOCKS})):
        kv_events = KvEvents(worker_id="d0", epoch=1, seq=seq, at_ms=T0, block_size=16, **changes)
        on.apply(KvEventsArrived(kv_events, seq))
    assert not on.router.is_idle, "blocks are gone"
    for _ in range(8):
        on.apply(Tick())
    assert on.router.is_idle


def test_router_serves_remote_request_by_prefill_and_decode() -> None:
    on = split()
    on.request("r1", tokens=10)
    (prefill,) = on.works
    assert (prefill.phase, prefill.mode, prefill.attempt) == (WorkPhase.PREFILL, Mode.REMOTE, 1)
    assert (prefill.worker_id, prefill.kv, prefill.first_seq) == ("p0", None, 0)
    kv = builders.handle(prefill, T0 + 30_000)
    on.phase(prefill, PhaseKind.PREFILL_DONE, kv=kv, cached_tokens=4)
    decode = on.works[-1]
    assert (decode.phase, decode.worker_id, decode.kv) == (WorkPhase.DECODE, "d0", kv)
    assert (decode.first_seq, decode.first_char, decode.cached_tokens) == (1, 3, 4)
    assert (decode.attempt, decode.prefill_worker, decode.first_token_ms) == (1, "p0", on.now_ms)
    effects = on.outcome(decode)
    (saved,) = [e for e in effects if isinstance(e, SaveSession)]
    assert (saved.session.decode_worker, saved.session.context_tokens) == ("d0", 26)
    kinds = [(d.kind, d.reason) for d in on.decisions]
    assert kinds == [
        (DecisionKind.PLACE, Reason.FIRST_TURN),
        (DecisionKind.HANDOFF, Reason.PREFILL_DONE),
    ]
    assert [c.worker_id for c in on.decisions[0].candidates] == ["p0", "d0"]
    assert not on.router.view()


def test_replica_computes_whole_request() -> None:
    on = replicas()
    on.request("r1")
    (work,) = on.works
    assert (work.phase, work.mode, work.kv) == (WorkPhase.DECODE, Mode.REPLICA, None)
    assert on.decisions[0].reason is Reason.ONLY_REPLICAS
    assert on.decisions[0].policy == "replica"


def test_outcome_of_prefill_worker_ends_request() -> None:
    on = split()
    on.request("r1")
    on.outcome(on.works[0], decode_worker="")
    assert not on.router.view()
    assert len(on.works) == 1


def test_session_stays_with_its_decode_worker() -> None:
    on = split(decodes=2, policy="static")
    first = to_decoding(on, "r1", session_id="s")
    on.outcome(first)
    to_decoding(on, "r2", session_id="other")  # makes d0 the busier one
    second = to_decoding(on, "r3", session_id="s")
    assert second.worker_id == first.worker_id == "d0"
    assert on.decisions[-1].reason is Reason.SESSION_WORKER
    assert on.decisions[-1].session_tokens == 26


def test_next_turn_finds_session_before_outcome_of_last_turn() -> None:
    on = split(decodes=2, policy="static", local_share=1.0)
    on.request("r0", session_id="other")
    first = to_decoding(on, "r1", session_id="one")
    on.request("r2", session_id="one", tokens=40)
    later = on.works[-1]
    assert (later.mode, later.worker_id) == (Mode.LOCAL, first.worker_id)
    assert on.decisions[-1].session_tokens == token_count(first.prompt_tokens)
    on.outcome(later)
    on.outcome(first)
    assert not on.router.tables.requests.by_session


@pytest.mark.parametrize("case", ["full", "gone"])
def test_session_moves_when_its_worker_is_full_or_gone(case: str) -> None:
    on = replicas(2, window=1)
    on.request("r1", session_id="s")
    on.outcome(on.works[-1])
    worker = on.workers["x0"]
    if case == "full":
        on.request("r2", session_id="s")
    else:
        on.worker("x0", Role.REPLICA, window=1)
    on.request("r3", session_id="s")
    expected = {"full": Reason.SESSION_WORKER_FULL, "gone": Reason.SESSION_WORKER_GONE}
    assert on.decisions[-1].reason is expected[case]
    assert on.works[-1].worker_id == ("x1" if case == "full" else worker.worker_id)


def test_request_waits_for_credit_and_is_served_by_class() -> None:
    on = replicas(window=1)
    on.request("r1")
    on.request("r2", priority=Priority.BATCH)
    on.request("r3", priority=Priority.INTERACTIVE)
    assert len(on.works) == 1
    on.outcome(on.works[0])
    assert [w.request_id for w in on.works] == ["r1", "r3"]
    assert on.decisions[-1].queue_length == 1


def test_prefill_runs_ahead_of_decode_up_to_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "HANDOVER_AHEAD", 1)
    on = RouterHarness()
    on.worker("p0", Role.PREFILL, window=10)
    on.worker("d0", Role.DECODE, window=1)
    on.pass_ms(250)
    for number in range(4):
        on.request(f"r{number}")
    assert len(on.works) == 2
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)  # takes the only decode credit
    on.phase(on.works[1], PhaseKind.PREFILL_DONE)
    assert state_of(on, "r1") is State.HANDING_OVER
    assert len([w for w in on.works if w.phase is WorkPhase.PREFILL]) == 2
    on.outcome(next(w for w in on.works if w.phase is WorkPhase.DECODE))
    assert state_of(on, "r1") is State.DECODING
    assert state_of(on, "r2") is State.PREFILLING


def test_router_spreads_requests_over_fresh_worker() -> None:
    on = split(prefills=2, decodes=1)
    on.worker("p2", Role.PREFILL, window=4)
    for number in range(6):
        on.request(f"r{number}", tokens=100)
    assert sorted(w.worker_id for w in on.works) == ["p0", "p0", "p1", "p1", "p2", "p2"]


def test_decode_worker_computes_prompt_after_long_absence_of_prefill() -> None:
    on = split(local_after_ms=1_000)
    on.workers["p0"].silent = True
    on.pass_ms(LEASE_MS + 250)
    on.request("r1")
    assert not on.works
    on.pass_ms(1_250)
    (work,) = on.works
    assert (work.mode, work.phase, work.kv) == (Mode.LOCAL, WorkPhase.DECODE, None)
    assert on.decisions[-1].reason is Reason.NO_WORKER


def test_decode_worker_serves_until_first_prefill_worker_joins() -> None:
    on = RouterHarness(local_after_ms=60_000)
    on.worker("d0", Role.DECODE)
    on.request("r1")
    assert [(work.mode, work.worker_id) for work in on.works] == [(Mode.LOCAL, "d0")]
    on.worker("p0", Role.PREFILL)
    on.request("r2")
    assert [(work.mode, work.worker_id) for work in on.works[1:]] == [(Mode.REMOTE, "p0")]


def test_decode_worker_serves_after_last_prefill_worker_changes_role() -> None:
    on = split(local_after_ms=60_000)
    on.fleet(builders.registration("p0", Role.DECODE, partition=7))
    on.request("r1")
    assert [(work.mode, work.worker_id) for work in on.works] == [(Mode.LOCAL, "d0")]
    on.worker("p0", Role.PREFILL, window=2)  # and it may come back
    on.request("r2")
    assert on.works[-1].mode is Mode.REMOTE
    on.workers["p0"].silent = True
    on.pass_ms(LEASE_MS + 250)
    on.request("r3")
    assert "r3" not in {work.request_id for work in on.works}  # it may only have lost its lease


def test_deadline_ends_request_in_every_state() -> None:
    on = RouterHarness()
    on.worker("p0", Role.PREFILL, window=2)
    on.worker("d0", Role.DECODE, window=0)
    on.pass_ms(250)
    on.request("handing", deadline_ms=on.now_ms + 1_000)
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    on.request("prefilling", deadline_ms=on.now_ms + 1_000)
    on.workers["p0"].window = 0
    on.beat(on.workers["p0"])
    on.request("queued", deadline_ms=on.now_ms + 1_000)
    on.pass_ms(1_000)
    assert set(on.outcomes) == {"handing", "queued"}
    on.pass_ms(5_250)  # the worker should have ended it by now
    assert {o.kind for o in on.outcomes.values()} == {OutcomeKind.EXPIRED}
    assert "prefilling" in on.outcomes


@pytest.mark.parametrize(("live", "reason"), [(0, Reason.NO_WORKER), (1, Reason.DEADLINE_PASSED)])
def test_expiry_reason_says_whether_workers_lived(live: int, reason: Reason) -> None:
    on = replicas(live, window=0)
    on.request("r1", deadline_ms=on.now_ms + 500)
    on.pass_ms(600)
    assert on.decisions[-1].reason is reason


def test_full_queue_sheds_worst_request() -> None:
    on = RouterHarness(queue_requests_max=2)
    on.request("r1", priority=Priority.BATCH)
    on.request("r2")
    on.request("r3", priority=Priority.INTERACTIVE)
    outcome = on.outcomes["r1"]
    assert outcome.kind is OutcomeKind.SHED
    assert outcome.error is not None and outcome.error.code == "queue_full"


def test_router_serves_other_tenants_during_flood() -> None:
    on = replicas(1, window=1)
    for number in range(5):
        on.request(f"a{number}", tenant="a")
    on.outcome(on.works[0])
    on.request("b0", tenant="b", deadline_ms=on.now_ms + 900_000)
    on.request("b1", tenant="b", deadline_ms=on.now_ms + 900_000)
    for _ in range(3):
        on.outcome(on.works[-1])
    assert [work.request_id for work in on.works] == ["a0", "a1", "b0", "a2", "b1"]


def test_draining_worker_finishes_work_and_takes_no_more() -> None:
    on = replicas(1)
    on.request("r1")
    on.workers["x0"].state = MemberState.DRAINING
    on.beat(on.workers["x0"])
    on.request("r2")
    assert len(on.works) == 1
    on.outcome(on.works[0])
    assert not on.outcomes["r1"].error


def test_handover_falls_back_to_replica_without_decode_workers() -> None:
    on = split()
    on.request("r1")
    on.workers["d0"].state = MemberState.GONE
    on.beat(on.workers["d0"])
    on.worker("x0", Role.REPLICA)
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    work = on.works[-1]
    assert (work.worker_id, work.kv, work.mode) == ("x0", None, Mode.LOCAL)
    assert on.decisions[-1].reason is Reason.NO_WORKER


def test_router_ignores_events_of_other_partitions() -> None:
    on = replicas()
    request = builders.request("r1")
    assert on.apply(RequestArrived(request, 3)) == []
    cancel = builders.cancellation("r1", reason=CancelReason.CLIENT_GONE)
    assert on.apply(CancellationArrived(cancel, 3)) == []


def test_router_ignores_records_about_unknown_requests_and_members() -> None:
    on = replicas()
    on.request("r1")
    stranger = replace(on.works[0], request_id="unknown", session_id="s")
    assert on.apply(OutcomeArrived(builders.outcome(stranger), PARTITION)) == []
    on.attempts["unknown"] = 1
    assert on.phase(stranger, PhaseKind.FAILED) == []
    on.fleet(builders.beat("nobody", 1, {Role.REPLICA: 4}))
    on.fleet(builders.beat("x0", 0, {Role.REPLICA: 99}))  # older than what is known
    assert on.router.tables.fleet.of("tiny").pools[Role.REPLICA].workers[0].window == 4


def test_sessions_are_bounded_expire_and_reload() -> None:
    on = replicas(sessions_max=2, session_ttl_ms=10_000)
    forgotten = []
    for number in range(3):
        on.request(f"r{number}", session_id=f"s{number}")
        effects = on.outcome(on.works[-1])
        forgotten += [e.session_id for e in effects if isinstance(e, DropSession)]
    assert forgotten == ["s0"]
    sessions = on.router.tables.sessions.all()
    log = [SessionLoaded(session, PARTITION) for session in sessions.values()]
    rebuilt = on.rebuilt(list(log))
    assert rebuilt.tables.sessions.all() == sessions
    on.pass_ms(11_000)
    assert len(on.router.tables.sessions) == 0
    assert on.router.tables.sessions.get(("", "s2"), on.now_ms) is None


def test_fleet_keeps_counts_through_role_changes() -> None:
    on = replicas(1, window=2)
    on.request("r1")
    worker = on.workers["x0"]
    fleet = on.router.tables.fleet.of("tiny")
    lease = builders.registration("x0", Role.DECODE, partition=worker.partition)
    on.fleet(lease)
    assert [w.worker_id for w in fleet.pools[Role.DECODE].workers] == ["x0"]
    assert not fleet.pools[Role.REPLICA].workers
    on.fleet(replace(lease, roles=(Role.REPLICA,)))
    assert fleet.pools[Role.REPLICA].workers[0].running == 1
    on.outcome(on.works[0])
    assert fleet.pools[Role.REPLICA].workers[0].running == 0


def test_rebuild_continues_cancellation_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "ATTEMPTS_MAX", 1)
    on = replicas(2)
    on.request("cancelled")
    on.cancel("cancelled")
    on.request("failed")
    on.phase(on.works[-1], PhaseKind.FAILED)
    log = [e for e in on.log if not isinstance(e, OutcomeArrived)]  # the outcome was not written
    router = Router(ROUTER, RouterSettings())
    for event, at_ms in on.fleet_log:
        router.apply(event, at_ms)
    router.apply(PartitionTaken(PARTITION), on.now_ms)
    for past_event in log:
        router.apply(past_event, on.now_ms)
    effects = router.apply(PartitionReady(PARTITION), on.now_ms)
    (end,) = [e for e in effects if isinstance(e, End)]
    assert (end.outcome.request_id, end.outcome.kind) == ("failed", OutcomeKind.FAILED)
    work, cancel = [e.record for e in effects if isinstance(e, Dispatch)]
    assert isinstance(work, Work), "the last router may not have sent what it decided"
    assert isinstance(cancel, CancelWork)
    assert work.request_id == cancel.request_id == "cancelled"
    assert router.view()["cancelled"][2] is State.CANCELLING


def test_rebuild_cancels_queued_request_and_remembers_early_cancel() -> None:
    on = RouterHarness()
    request = builders.request("waits")
    router = Router(ROUTER, RouterSettings())
    router.apply(PartitionTaken(PARTITION), T0)
    router.apply(RequestArrived(request, PARTITION), T0)
    for request_id in ("waits", "later"):
        cancel = builders.cancellation(request_id)
        router.apply(CancellationArrived(cancel, PARTITION), T0)
    effects = router.apply(PartitionReady(PARTITION), on.now_ms)
    assert [e.outcome.request_id for e in effects if isinstance(e, End)] == ["waits"]
    effects = router.apply(RequestArrived(builders.request("later"), PARTITION), T0)
    assert [e.outcome.kind for e in effects if isinstance(e, End)] == [OutcomeKind.CANCELLED]


def test_router_bounds_ended_ids_and_early_cancellations() -> None:
    on = replicas(ended_max=2)
    on.router.tables.early_cancellations = EarlyCancellations(2)
    for number in range(5):
        on.cancel(f"early{number}")
        on.request(f"r{number}")
        on.outcome(on.works[-1])
    tables = on.router.tables
    assert (len(tables.ended_ids), len(tables.early_cancellations)) == (2, 2)
    on.pass_ms(70_000)
    assert (len(tables.ended_ids), len(tables.early_cancellations)) == (0, 0)


def test_fleet_forgets_members_silent_for_long() -> None:
    on = replicas(1)
    on.workers["x0"].silent = True
    fleet = on.router.tables.fleet
    for _ in range(10):
        on.now_ms += 61_000
        on.pass_ms(1_100)
    assert "x0" not in fleet.view.members
    assert not fleet.of("tiny") and not fleet.models


def answered_with_kv(on: RouterHarness, life_ms: int = 30_000) -> KvHandle:
    """The first turn of a session, whose answer's KV its decode worker keeps."""
    decode = to_decoding(on, "r1", session_id="s")
    kv = builders.handle(decode, on.now_ms + life_ms)
    on.outcome(decode, kv=kv)
    return kv


def test_next_prefill_reads_kv_of_answer_once() -> None:
    on = split(prefills=2, policy="static")
    kv = answered_with_kv(on)
    session = on.router.tables.sessions.get(("", "s"), on.now_ms)
    assert session is not None and session.kv == kv
    for request_id in ("r2", "r3"):
        on.request(request_id, session_id="s")
    assert [work.kv for work in on.works[-2:]] == [kv, None]
    on.phase(on.works[-2], PhaseKind.FAILED)
    assert (on.works[-1].attempt, on.works[-1].kv) == (2, None)


@pytest.mark.parametrize("case", ["expires", "epoch", "takeover", "pair", "tenant"])
def test_next_turn_reads_no_kv_of_answer_that_may_be_wrong(case: str) -> None:
    on = split(policy="static")
    kv = answered_with_kv(on, life_ms=1_000 if case == "expires" else 30_000)
    if case == "epoch":
        on.worker("d0", Role.DECODE, window=4)
    elif case == "takeover":
        sessions = on.router.tables.sessions.all()
        assert sessions["", "s"].kv == kv
        rebuilt = on.rebuilt([SessionLoaded(sessions["", "s"], PARTITION)])
        assert rebuilt.tables.sessions.all() == {("", "s"): replace(sessions["", "s"], kv=None)}
        return
    elif case == "pair":
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            worker = on.workers[name]
            lists = builders.capability(name, *builders.ALL)
            on.fleet(
                builders.registration(name, role, partition=worker.partition, capability=lists)
            )
    on.request("r2", session_id="s", tenant="bob" if case == "tenant" else "")
    assert on.works[-1].attempt == 1 and on.works[-1].request_id == "r2"
    assert kv not in [work.kv for work in on.works]


def test_router_counts_cached_prefixes_only_within_cache_scope() -> None:
    """The work carries the scope to its worker."""
    on = split(2)
    salt = prefix.salt_of("ada")
    chain = prefix.pack(prefix.chain(range(640), 16, salt))
    kv_events = KvEvents(
        worker_id="p1", epoch=1, seq=0, at_ms=T0, block_size=16, snapshot=True, stored=chain
    )
    on.apply(KvEventsArrived(kv_events, 0))
    for number, scope in enumerate(("ada", "bob", "")):
        on.request(f"r{number}", tokens=640, cache_scope=scope)
        cached = [candidate.cached_tokens for candidate in on.decisions[-1].candidates]
        assert (max(cached) > 0) == (scope == "ada")
        assert on.works[-1].cache_scope == scope


def test_decision_shows_weights_load_and_cached_tokens() -> None:
    on = split()
    on.request("r1", tokens=64, w_ttft=0.9, w_tpot=0.1)
    on.fleet(builders.beat(ROUTER, 99))
    chain = prefix.pack(prefix.chain(range(64), 16)[:3])
    kv_events = KvEvents(
        worker_id="d0", epoch=1, seq=0, at_ms=T0, block_size=16, snapshot=True, stored=chain
    )
    assert on.apply(KvEventsArrived(kv_events, 0)) == []
    on.request("r2", tokens=64)
    first, second = on.decisions
    assert (first.w_ttft, first.w_tpot) == (0.9, 0.1)
    assert first.load == 0.0 and second.load > 0
    assert [c.cached_tokens for c in first.candidates] == [0, 0]
    assert [c.cached_tokens for c in second.candidates] == [0, 48]
