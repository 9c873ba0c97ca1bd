"""Which KV handles of a work order may be used, and whether its peer can be trusted with them.

A late handle is never read or written, because its blocks may hold another prompt by now; nor is
one of an earlier life. A worker is no peer of itself: what it computed is in its own cache. Pure;
`workers/llm/held.py` calls it.
"""

from collections.abc import Callable

from schemas.errors import KvUnavailable
from schemas.records import KvHandle, Work, WorkPhase
from workers.llm.stream import Identity

EpochOf = Callable[[str], int]  # the latest epoch of a worker, 0 where it is unknown


def usable_kv(work: Work, me: Identity, now_ms: int, epoch_of: EpochOf) -> KvHandle | None:
    """The handle to fetch; none computes the prompt in place.

    For prefill it is what the session's decode worker kept, for decode what prefill computed.
    """
    kv = work.kv
    return None if kv is None or _fault(kv, me, now_ms, epoch_of) else kv


def check_promise(work: Work, me: Identity, now_ms: int, epoch_of: EpochOf) -> None:
    """Raise KvUnavailable where paired work names no peer that can keep its promise."""
    if not work.orchestration.is_paired:
        return
    name = "kv_target" if work.phase is WorkPhase.PREFILL else "kv"
    promise = work.kv_target if work.phase is WorkPhase.PREFILL else work.kv
    fault = f"expected {name}, found none"
    if promise is not None:
        fault = _fault(promise, me, now_ms, epoch_of)
    if fault:
        raise KvUnavailable(
            f"request {work.request_id}, {work.phase} of {work.orchestration} on {me.worker_id}: "
            f"{fault}"
        )


def _fault(kv: KvHandle, me: Identity, now_ms: int, epoch_of: EpochOf) -> str:
    """What is wrong with a handle; empty if nothing."""
    if kv.worker_id == me.worker_id:
        return "the peer is this worker itself"
    if kv.expires_at_ms <= now_ms:
        return f"the promise of {kv.worker_id} ended {now_ms - kv.expires_at_ms} ms ago"
    latest = epoch_of(kv.worker_id)
    if kv.worker_epoch < latest:
        return f"{kv.worker_id} lives in epoch {latest}, the promise is of {kv.worker_epoch}"
    return ""
