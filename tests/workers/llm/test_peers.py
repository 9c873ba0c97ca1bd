"""Which KV handles may be used: each fault by itself, for a handle and for a promise."""

from dataclasses import dataclass, replace

import pytest

from schemas.errors import KvUnavailable
from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import KvHandle, Orchestration, WorkPhase
from tests.workers.fakes import EPOCH, WORKER, handle, work
from workers.llm.peers import check_promise, kv_fault
from workers.llm.stream import WorkerIdentity

ME, NOW_MS = WorkerIdentity(worker_id=WORKER, epoch=EPOCH), 5_000
GOOD = replace(handle(NOW_MS + 1), worker_id="peer", worker_epoch=4)


@dataclass
class Known:
    """What this worker knows of its peer."""

    epoch: int = 4
    apart: int = 0

    def epoch_of(self, worker_id: str) -> int:
        return self.epoch

    def clock_offset_ms(self, worker_id: str) -> int:
        return self.apart


FAULTS = [
    (replace(GOOD, worker_id=WORKER), Known(), "this worker itself"),
    (replace(GOOD, expires_at_ms=NOW_MS), Known(), "ended 0 ms ago"),
    (GOOD, Known(epoch=5), "lives in epoch 5"),
    (GOOD, Known(apart=CLOCK_MARGIN_MS + 1), "clock"),
]


def test_a_good_handle_is_used_also_of_a_worker_that_is_not_known() -> None:
    for known in (Known(), Known(epoch=0), Known(apart=CLOCK_MARGIN_MS)):
        assert kv_fault(replace(work(), kv=GOOD), ME, NOW_MS, known) == ""
    assert kv_fault(replace(work(), kv=None), ME, NOW_MS, Known()) == ""


@pytest.mark.parametrize(("kv", "known", "why"), FAULTS)
def test_a_faulty_handle_is_left_and_a_faulty_promise_is_refused(
    kv: KvHandle, known: Known, why: str
) -> None:
    assert kv_fault(replace(work(), kv=kv), ME, NOW_MS, known)
    paired = replace(work(), kv=kv, phase=WorkPhase.DECODE, orchestration=Orchestration.CONCURRENT)
    with pytest.raises(KvUnavailable, match=why):
        check_promise(paired, ME, NOW_MS, known)


def test_only_paired_work_needs_a_promise_and_prefill_needs_a_target() -> None:
    alone = replace(work(), kv=None, orchestration=Orchestration.PREFILL_FIRST)
    check_promise(alone, ME, NOW_MS, Known())
    paired = replace(
        work(), kv=GOOD, phase=WorkPhase.PREFILL, orchestration=Orchestration.DECODE_FIRST
    )
    with pytest.raises(KvUnavailable, match="expected kv_target, found none"):
        check_promise(paired, ME, NOW_MS, Known())
    check_promise(replace(paired, kv_target=GOOD), ME, NOW_MS, Known())
