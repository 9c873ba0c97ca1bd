"""Which KV handles may be used: each fault by itself, for a handle and for a promise."""

from dataclasses import dataclass, replace

import pytest

from schemas.errors import KvUnavailable
from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import KvHandle, Orchestration, WorkPhase
from tests.workers.fakes import EPOCH, WORKER, handle, work
from workers.llm.stream import WorkerIdentity, check_promise, kv_fault

ME, NOW_MS = WorkerIdentity(worker_id=WORKER, epoch=EPOCH), 5_000
GOOD = replace(handle(NOW_MS + 1), worker_id="peer", worker_epoch=4)


@dataclass
class PeerView:
    """What this worker knows of its peer."""

    epoch: int = 4
    apart: int = 0

    def epoch_of(self, worker_id: str) -> int:
        return self.epoch

    def clock_offset_ms(self, worker_id: str) -> int:
        return self.apart


FAULTS = [
    (replace(GOOD, worker_id=WORKER), PeerView(), "this worker itself"),
    (replace(GOOD, expires_at_ms=NOW_MS), PeerView(), "ended 0 ms ago"),
    (GOOD, PeerView(epoch=5), "lives in epoch 5"),
    (GOOD, PeerView(apart=CLOCK_MARGIN_MS + 1), "clock"),
]


def test_kv_fault_accepts_valid_handle_of_unknown_worker() -> None:
    for peer_view in (PeerView(), PeerView(epoch=0), PeerView(apart=CLOCK_MARGIN_MS)):
        assert kv_fault(replace(work(), kv=GOOD), ME, NOW_MS, peer_view) == ""
    assert kv_fault(replace(work(), kv=None), ME, NOW_MS, PeerView()) == ""


@pytest.mark.parametrize(("kv", "peer_view", "why"), FAULTS)
def test_peer_checks_refuse_faulty_handle_and_promise(
    kv: KvHandle, peer_view: PeerView, why: str
) -> None:
    assert kv_fault(replace(work(), kv=kv), ME, NOW_MS, peer_view)
    paired = replace(work(), kv=kv, phase=WorkPhase.DECODE, orchestration=Orchestration.CONCURRENT)
    with pytest.raises(KvUnavailable, match=why):
        check_promise(paired, ME, NOW_MS, peer_view)


def test_promise_check_requires_target_of_paired_prefill_only() -> None:
    alone = replace(work(), kv=None, orchestration=Orchestration.PREFILL_FIRST)
    check_promise(alone, ME, NOW_MS, PeerView())
    paired = replace(
        work(), kv=GOOD, phase=WorkPhase.PREFILL, orchestration=Orchestration.DECODE_FIRST
    )
    with pytest.raises(KvUnavailable, match="expected kv_target, found none"):
        check_promise(paired, ME, NOW_MS, PeerView())
    check_promise(replace(paired, kv_target=GOOD), ME, NOW_MS, PeerView())
