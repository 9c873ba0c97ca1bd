"""Decides which KV handles of a work record may be used.

A handle is refused if it has expired, because its blocks may have another prompt by then; if its
worker has begun a new epoch since; if that worker's clock differs too much from this one's; and if
it is this worker's own, whose KV is in the prefix cache. Pure; called by
`workers/llm/active_requests.py`.
"""

from typing import Protocol

from schemas.errors import KvUnavailable
from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import KvHandle, Work, WorkPhase
from schemas.rules.pairs import is_paired
from workers.llm.stream import WorkerIdentity


class Peers(Protocol):
    """This worker's view of other workers."""

    def epoch_of(self, worker_id: str) -> int:
        """Return the worker's latest epoch; 0 if it is unknown."""

    def clock_offset_ms(self, worker_id: str) -> int:
        """Return by how many ms its clock differs from this one's."""


def kv_fault(work: Work, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> str:
    """Return why the KV must not be fetched and the prompt is computed here; "" if it may.

    A prefill job's handle is for KV that the session's decode worker kept, a decode job's for KV
    that prefill computed.
    """
    return "" if work.kv is None else _fault(work.kv, identity, now_ms, peer_view)


def check_promise(work: Work, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> None:
    """Raise KvUnavailable if paired work has no usable handle of its peer."""
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
    """Return what is wrong with a handle; "" if nothing."""
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
