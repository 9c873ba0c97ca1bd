"""Two workers that hold one attempt at the same time, as each of them sees it."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import DeadlineExceeded, KvUnavailable
from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import (
    CancelWork,
    KvHandle,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    PhaseKind,
    Role,
    Sampling,
    Work,
    WorkPhase,
)
from tests.workers.fakes import EPOCH, WORKER, cancel_work, handle, out, work
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, PREFILL, WorkerInMemory

PAIRED = [Orchestration.DECODE_FIRST, Orchestration.CONCURRENT]


def promise(worker_id: str, **changes: Any) -> KvHandle:
    return replace(handle(NOW_MS + 60_000, worker_id), worker_epoch=3, **changes)


def paired(
    phase: WorkPhase, orchestration: Orchestration = Orchestration.CONCURRENT, **changes: Any
) -> Work:
    """This worker's half of a pair whose other half runs on `p` or `d`."""
    peer = {"kv_target": promise("d")} if phase is PREFILL else {"kv": promise("p")}
    fields = {"mode": Mode.REMOTE, "orchestration": orchestration, **peer, **changes}
    return work("r1", phase, NOW_MS, **fields)


def void_order() -> CancelWork:
    return replace(cancel_work(), void=True)


@pytest.mark.parametrize("orchestration", PAIRED)
def test_paired_job_names_its_peer(orchestration: Orchestration) -> None:
    worker = WorkerInMemory()
    worker.take(paired(PREFILL, orchestration))
    (job,) = worker.engine.jobs
    assert (job.orchestration, job.kv, job.kv_target) == (orchestration, None, promise("d"))
    worker = WorkerInMemory()
    worker.take(paired(DECODE, orchestration))
    (job,) = worker.engine.jobs
    assert (job.orchestration, job.kv, job.kv_target) == (orchestration, promise("p"), None)


def test_decode_reports_allocation_with_own_worker_id() -> None:
    worker = WorkerInMemory()
    worker.take(paired(DECODE, Orchestration.DECODE_FIRST))
    worker.step(out(kv=handle(NOW_MS + 9), cached_tokens=2))
    (phase,) = worker.phases
    assert (phase.kind, phase.cached_tokens) == (PhaseKind.KV_ALLOCATED, 2)
    assert phase.kv == replace(handle(NOW_MS + 9), worker_id=WORKER, worker_epoch=EPOCH)
    assert not worker.frames.pending()
    assert worker.requests.kv_until_ms == 0  # nobody pulls it: a drain need not wait


@pytest.mark.parametrize("orchestration", PAIRED)
def test_paired_decode_sends_all_tokens_and_writes_outcome(
    orchestration: Orchestration,
) -> None:
    worker = WorkerInMemory()
    worker.take(paired(DECODE, orchestration))
    kv = handle(NOW_MS + 9)
    worker.step(out(ids=[5], text="a", kv_bytes=640, transfer_ms=1.5, cached_tokens=2))
    worker.step(out(ids=[6], text="b", finish_reason="stop", kv=kv))
    assert [phase.kind for phase in worker.phases] == [PhaseKind.KV_RECEIVED]
    (batch,) = worker.frames.take(NOW_MS)
    assert (list(batch.frame.first_seqs), list(batch.frame.token_ids)) == ([0], [5, 6])
    ((outcome, _),) = batch.reports
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.orchestration) == (OutcomeKind.COMPLETED, orchestration)
    assert (outcome.prefill_worker, outcome.decode_worker) == ("p", WORKER)
    assert (outcome.cached_tokens, outcome.kv_bytes) == (2, 640)
    assert outcome.kv == replace(kv, worker_id=WORKER, worker_epoch=EPOCH)


@pytest.mark.parametrize("last", ["handover", "stop", "length"])
def test_paired_prefill_reports_and_leaves_end_to_decode(last: str) -> None:
    worker = WorkerInMemory()
    worker.take(paired(PREFILL))
    worker.step(out(ids=[5], text="a", cached_tokens=1, kv_bytes=100))
    assert worker.frame().token_ids == [5]
    assert (worker.phases, len(worker.requests)) == ([], 1)
    worker.step(out(finish_reason=last, kv_bytes=640, transfer_ms=1.5))
    (phase,) = worker.phases
    assert (phase.kind, phase.kv) == (PhaseKind.PREFILL_DONE, None)
    assert (phase.kv_bytes, phase.transfer_ms, phase.kv_read_bytes) == (640, 1.5, 100)
    assert (phase.sent_tokens, phase.sent_chars, phase.cached_tokens) == (1, 1, 1)
    assert (worker.frames.pending(), len(worker.requests)) == (False, 0)


def expire_at_worker(worker: WorkerInMemory) -> None:
    worker.requests.expire(NOW_MS + 60_000)


def expire_at_engine(worker: WorkerInMemory) -> None:
    worker.step(out(finish_reason="error", error=DeadlineExceeded("late").to_wire()))


def cancel(worker: WorkerInMemory) -> None:
    worker.requests.cancel(cancel_work(), NOW_MS)


def cancel_as_void(worker: WorkerInMemory) -> None:
    worker.requests.cancel(void_order(), NOW_MS)


@pytest.mark.parametrize("end", [expire_at_worker, expire_at_engine, cancel, cancel_as_void])
@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_only_paired_decode_writes_outcome_unless_voided(phase: WorkPhase, end: Any) -> None:
    worker = WorkerInMemory()
    worker.take(paired(phase, deadline_ms=NOW_MS + 60_000))
    end(worker)
    assert (worker.phases, len(worker.requests)) == ([], 0)
    assert end is expire_at_engine or worker.engine.aborted == ["r1.1"]
    if phase is PREFILL or end is cancel_as_void:
        assert not worker.frames.pending()
    else:
        kind = OutcomeKind.CANCELLED if end is cancel else OutcomeKind.EXPIRED
        assert worker.end()[1].kind is kind
    worker.step(out(ids=[5], text="a"), out(finish_reason="abort"))
    assert (worker.phases, worker.frames.pending()) == ([], False)


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_either_phase_of_pair_reports_engine_error(phase: WorkPhase) -> None:
    worker = WorkerInMemory()
    worker.take(paired(phase))
    worker.step(out(finish_reason="error", error=KvUnavailable("gone").to_wire()))
    assert [(p.kind, p.error.code) for p in worker.phases if p.error] == [
        (PhaseKind.FAILED, "kv_unavailable")
    ]


def test_void_order_frees_kv_of_unknown_request() -> None:
    worker = WorkerInMemory()
    worker.requests.cancel(void_order(), NOW_MS)
    assert (worker.engine.aborted, worker.phases, worker.frames.pending()) == (["r1.1"], [], False)


def test_void_order_ends_work_without_report() -> None:
    worker = WorkerInMemory()
    worker.work()
    worker.step(out(ids=[5], text="a"))
    worker.frames.take(NOW_MS)
    worker.requests.cancel(void_order(), NOW_MS)
    assert (worker.engine.aborted, worker.phases, len(worker.requests)) == (["r1.1"], [], 0)
    assert not worker.frames.pending()


STALE = {
    "found none": None,
    "this worker itself": {"worker_id": WORKER},
    "ended 1 ms ago": {"expires_at_ms": NOW_MS - 1},
    "lives in epoch 4": {"worker_epoch": 3},
}


@pytest.mark.parametrize("fault", STALE)
@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_worker_refuses_unusable_promise(phase: WorkPhase, fault: str) -> None:
    worker = WorkerInMemory()
    worker.epochs = {"p": 4, "d": 4} if fault == "lives in epoch 4" else {}
    name, peer = ("kv_target", "d") if phase is PREFILL else ("kv", "p")
    changes = STALE[fault]
    stale = None if changes is None else replace(promise(peer), **changes)
    worker.take(replace(paired(phase), **{name: stale}))  # type: ignore[arg-type]  # by name
    (report,) = worker.phases
    assert report.error is not None
    assert (report.kind, report.error.code) == (PhaseKind.FAILED, "kv_unavailable")
    assert report.error.retriable
    assert fault in report.error.message
    assert (worker.engine.jobs, len(worker.requests)) == ([], 0)


def test_late_pair_expires_only_at_decode() -> None:
    for phase in (PREFILL, DECODE):
        worker = WorkerInMemory()
        worker.take(paired(phase, deadline_ms=NOW_MS))
        assert (worker.engine.jobs, worker.phases) == ([], [])
        assert worker.frames.pending() is (phase is DECODE)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, True),
        ({"worker_id": WORKER}, False),
        ({"expires_at_ms": NOW_MS}, False),
        ({"worker_epoch": 2}, False),
    ],
)
def test_prefill_reads_session_kv_unless_stale(changes: dict[str, Any], read: bool) -> None:
    worker = WorkerInMemory()
    worker.epochs = {"d": 3}
    history = replace(promise("d"), **changes)
    worker.take(work("r1", PREFILL, NOW_MS, kv=history))
    assert worker.engine.jobs[0].kv == (history if read else None)
    assert worker.engine.aborted == []  # the handle is of another request and ends by itself
    kv = handle(NOW_MS + 9)
    worker.step(out(ids=[5], text="a", cached_tokens=2, kv_bytes=64))
    worker.step(out(finish_reason="handover", kv=kv, transfer_ms=0.5))
    worker.frame()
    (phase,) = worker.phases
    assert (phase.kind, phase.kv_bytes, phase.cached_tokens) == (PhaseKind.PREFILL_DONE, 64, 2)


def test_decode_recomputes_prompt_of_stale_handle() -> None:
    worker = WorkerInMemory()
    worker.epochs = {"p": 4}
    worker.take(work("r1", DECODE, NOW_MS, kv=promise("p"), prefill_worker="p"))
    assert worker.engine.jobs[0].kv is None


@pytest.mark.parametrize("apart_ms", [CLOCK_MARGIN_MS, CLOCK_MARGIN_MS + 1])
def test_decode_recomputes_prompt_if_peer_clock_differs(apart_ms: int) -> None:
    """This worker cannot judge the handle's expiry on another clock."""
    worker = WorkerInMemory()
    worker.epochs, worker.clocks_ms = {"p": 3}, {"p": apart_ms}
    worker.take(work("r1", DECODE, NOW_MS, kv=promise("p"), prefill_worker="p"))
    assert (worker.engine.jobs[0].kv is not None) is (apart_ms <= CLOCK_MARGIN_MS)


def test_first_row_introduces_stream() -> None:
    worker = WorkerInMemory()
    worker.take(paired(PREFILL))
    worker.step(out(ids=[5], text="a"))
    (start,) = worker.frame().starts
    assert (start.request_id, start.attempt, start.mode) == ("r1", 1, Mode.REMOTE)
    assert start.orchestration is Orchestration.CONCURRENT
    assert (start.prefill_worker, start.decode_worker) == (WORKER, "d")
    worker.step(out(ids=[6], text="b"))
    assert worker.frame().starts == []


def test_decode_introduces_stream_with_its_first_row() -> None:
    worker = WorkerInMemory()
    handed = {"kv": promise("p"), "first_seq": 1, "first_char": 1}
    worker.take(work("r1", DECODE, NOW_MS, mode=Mode.REMOTE, **handed))
    worker.step(out(ids=[5], text="a"))
    assert not worker.frames.pending()  # prefill has sent this one
    worker.step(out(ids=[6], text="b"))
    (start,) = worker.frame().starts
    assert (start.prefill_worker, start.decode_worker) == ("p", WORKER)


def test_stream_start_names_workers_of_prefill_and_replica() -> None:
    worker = WorkerInMemory()
    worker.work("r1", PREFILL)
    worker.work("r2")
    worker.step(out("r1.1", [5], "a"), out("r2.1", [5], "a"))
    first, second = worker.frame().starts
    assert (first.prefill_worker, first.decode_worker) == (WORKER, "")
    assert (second.prefill_worker, second.decode_worker) == (WORKER, WORKER)


def test_worker_with_new_role_refuses_work_and_finishes_requests() -> None:
    worker = WorkerInMemory(4, 64, Role.PREFILL)
    worker.work("r1", PREFILL)
    worker.requests.assign([Role.DECODE], 1)
    worker.work("r2", PREFILL)
    worker.work("r3", DECODE)
    assert [(p.request_id, p.kind) for p in worker.phases] == [
        ("r2", PhaseKind.REFUSED),
        ("r3", PhaseKind.REFUSED),  # one is held already
    ]
    worker.step(out(ids=[5], text="a", finish_reason="handover", kv=handle(NOW_MS + 9)))
    worker.frame()
    assert worker.phases[-1].kind is PhaseKind.PREFILL_DONE
    worker.work("r4", DECODE, sampling=Sampling(max_tokens=2))
    assert worker.engine.jobs[-1].request_id == "r4.1"


def test_decode_reports_handle_that_expired() -> None:
    worker = WorkerInMemory()
    worker.take(work("r1", DECODE, NOW_MS, kv=handle(NOW_MS, "w0"), prefill_worker="w0"))
    assert worker.engine.jobs[0].kv is None
    (phase,) = worker.phases
    assert phase.kind is PhaseKind.KV_MISSED
    assert phase.error is not None and "ended 0 ms ago" in phase.error.message
