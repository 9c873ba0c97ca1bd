"""Which KV handles of a work order may be used.

A handle is refused when it is late, because its blocks may hold another prompt by then; when its
worker has begun a new life since; when that worker's clock differs too much from this one's; and
when it is this worker's own, which finds what it computed in its own cache. Pure; called by
`workers/llm/active_requests.py`.
"""

from typing import Protocol

from schemas.errors import KvUnavailable
from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import KvHandle, Work, WorkPhase
from schemas.rules.pairs import is_paired
from workers.llm.stream import WorkerIdentity


class Peers(Protocol):
    """What this worker knows of others."""

    def epoch_of(self, worker_id: str) -> int:
        """The latest epoch; 0 where it is unknown."""

    def clock_offset_ms(self, worker_id: str) -> int:
        """By how much its clock differs from this one's."""


def kv_fault(work: Work, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> str:
    """Why a handle must not be fetched, so that the prompt is computed in place; "" if it may.

    For prefill it is what the session's decode worker kept, for decode what prefill computed.
    """
    return "" if work.kv is None else _fault(work.kv, identity, now_ms, peer_view)


def check_promise(work: Work, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> None:
    """Raise KvUnavailable where paired work names no peer that can keep its promise."""
    if not is_paired(work.orchestration):
        return
    name = "kv_target" if work.phase is WorkPhase.PREFILL else "kv"
    promise = work.kv_target if work.phase is WorkPhase.PREFILL else work.kv
    fault = f"expected {name}, found none"
    if promise is not None:
        fault = _fault(promise, identity, now_ms, peer_view)
    if fault:
        raise KvUnavailable(
            f"request {work.request_id}, {work.phase} of {work.orchestration} on "
            f"{identity.worker_id}: {fault}"
        )


def _fault(kv: KvHandle, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> str:
    """What is wrong with a handle; empty if nothing."""
    if kv.worker_id == identity.worker_id:
        return "the peer is this worker itself"
    if kv.expires_at_ms <= now_ms:
        return f"the promise of {kv.worker_id} ended {now_ms - kv.expires_at_ms} ms ago"
    latest, offset_ms = peer_view.epoch_of(kv.worker_id), peer_view.clock_offset_ms(kv.worker_id)
    if kv.worker_epoch < latest:
        return f"{kv.worker_id} lives in epoch {latest}, the promise is of {kv.worker_epoch}"
    if offset_ms > CLOCK_MARGIN_MS:
        return (
            f"the clock of {kv.worker_id} differs by {offset_ms} ms, at most {CLOCK_MARGIN_MS} are "
            "taken; keep the hosts' clocks by NTP"
        )
    return ""
