"""KV between two simulated workers, for each orchestration; see ARCHITECTURE.md for their order.

prefill_first: the decode worker reads what it lacks. decode_first: the prefill worker reads what
only the decode worker has, computes, and writes the rest. concurrent: both start at once, the
decode worker says what it has, the prefill worker writes the rest.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from schemas.records import Orchestration, PhaseKind

if TYPE_CHECKING:
    from infra.simulator.job import Job
    from infra.simulator.worker import SimWorker


def pull(worker: "SimWorker", job: "Job") -> None:
    """Read a handed-over prompt's KV, but for what is cached here."""
    assert job.work.kv is not None
    source = worker.peers[job.work.kv.worker_id]
    key = job.work.kv.engine_request_id
    if key not in source.handed:  # expired on the way: compute it here
        worker.compute(job)
        return
    job.kv_bytes = _bytes(worker, job.prompt_tokens - _kept(worker, job))
    if not worker.buffer(job):
        return

    def done(took_ms: float) -> None:
        source.free(key)
        if worker.jobs.get(job.key) is job:
            _received(worker, job, took_ms)
            worker.decode(job, job.output_tokens - 1)

    _move(job, source, worker, job.kv_bytes, done)


def start_decode(worker: "SimWorker", job: "Job") -> None:
    """Memory is allocated: tell whoever is to write into it."""
    if job.work.orchestration is Orchestration.DECODE_FIRST:
        kept = _kept(worker, job) // worker.setup.block_tokens * worker.setup.block_tokens
        handle = job.handle(kept, worker.setup.block_tokens, job.work.deadline_ms)
        worker.ports.phase(job.phase(PhaseKind.KV_ALLOCATED, worker.clock.now_ms, kv=handle))
        return
    assert job.work.kv is not None
    source = worker.peers[job.work.kv.worker_id]

    def want() -> None:
        partner = source.jobs.get(job.key)
        if partner is not None and worker.jobs.get(job.key) is job:
            partner.valid_tokens = _kept(worker, job)
            write_when_ready(source, partner)

    worker.clock.after(worker.setup.link.latency_ms, want)


def start_prefill(worker: "SimWorker", job: "Job") -> None:
    """Compute for a decode worker that holds memory for it, from what either side has cached."""
    target = job.work.kv_target
    assert target is not None
    job.peer_id = target.worker_id
    peer = worker.peers[target.worker_id]
    partner = peer.jobs.get(job.key)
    if job.work.orchestration is Orchestration.DECODE_FIRST:
        job.valid_tokens = target.tokens
        if target.tokens > job.cached_tokens:
            _read_back(worker, job, peer)
            return
    elif partner is not None and partner.held is not None:  # its word came first
        job.valid_tokens = _kept(peer, partner)
    worker.compute(job)


def _read_back(worker: "SimWorker", job: "Job", peer: "SimWorker") -> None:
    """Fetch the history from the decode worker instead of computing it again."""
    assert job.valid_tokens is not None
    job.kv_bytes = _bytes(worker, job.valid_tokens - job.cached_tokens)

    def done(took_ms: float) -> None:
        if worker.jobs.get(job.key) is job:
            assert job.valid_tokens is not None
            job.transfer_ms = took_ms
            job.cached_tokens = min(job.valid_tokens, job.prompt_tokens - 1)
            worker.name_blocks(job, job.valid_tokens)
            worker.compute(job)

    _move(job, peer, worker, job.kv_bytes, done)


def write_when_ready(worker: "SimWorker", job: "Job") -> None:
    """Write what the decode worker lacks, once the prompt is computed and its word is here."""
    if not job.computed or job.posted or job.valid_tokens is None:
        return
    job.posted = True
    peer = worker.peers[job.peer_id]
    kv_bytes = _bytes(worker, job.prompt_tokens - job.valid_tokens)

    def done(took_ms: float) -> None:
        partner = peer.jobs.get(job.key)
        if partner is not None:
            partner.kv_bytes = kv_bytes
            _received(peer, partner, took_ms)
            peer.decode(partner, partner.output_tokens)
        if worker.jobs.get(job.key) is job:
            job.kv_bytes, job.transfer_ms = kv_bytes, took_ms
            phase = job.phase(PhaseKind.PREFILL_DONE, worker.clock.now_ms, sent_tokens=1)
            worker.ports.phase(phase)
            worker.drop(job)

    _move(job, worker, peer, kv_bytes, done)


def _move(
    job: "Job",
    source: "SimWorker",
    target: "SimWorker",
    kv_bytes: int,
    done: Callable[[float], None],
) -> None:
    request_id = job.work.request_id
    target.links.move(request_id, source.worker_id, target.worker_id, kv_bytes, done)


def _received(worker: "SimWorker", job: "Job", took_ms: float) -> None:
    job.transfer_ms = took_ms
    worker.ports.phase(job.phase(PhaseKind.KV_RECEIVED, worker.clock.now_ms))


def _kept(worker: "SimWorker", job: "Job") -> int:
    """Prompt tokens that need not be sent: whole cached blocks, where the setup keeps them."""
    if not worker.setup.receiver_keeps or job.held is None:
        return 0
    return min(len(job.held.hashes) * worker.setup.block_tokens, job.prompt_tokens)


def _bytes(worker: "SimWorker", tokens: int) -> int:
    return max(0, tokens) * worker.setup.model.kv_bytes_per_token
