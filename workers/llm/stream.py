"""An active request on a worker, and builders of the records about it.

Pure. `prefill.py`, `decode.py` and `active_requests.py` decide which record is due when.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.records import (
    KvHandle,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    StreamEnd,
    StreamStart,
    TokenLogprob,
    WireError,
    Work,
    WorkPhase,
)
from schemas.rules.pairs import is_paired
from schemas.rules.phases import phase_of
from streams.log.clients import Headers
from workers.llm.engine import ProbeTotals
from workers.llm.frames import FrameColumns

NOTHING = ProbeTotals(probes=0, retrieved_tokens=0, stalled_ms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Name and epoch of this worker."""

    worker_id: str
    epoch: int


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """One phase of a request on this worker; `seq` and `chars` count from the answer's start."""

    work: Work
    job_id: str  # the request's id inside the engine; each attempt has its own
    columns: FrameColumns
    headers: Headers
    prompt_tokens: int
    started_ms: int
    request_id: str
    attempt: int
    first_seq: int  # the prefill worker has sent the tokens and characters before these
    first_char: int
    first_token_ms: int
    prior_tokens: int = 0  # the answer's tokens of earlier attempts; they are in the prompt
    seq: int = 0
    chars: int = 0
    cached_tokens: int = 0
    kv_bytes: int = 0
    kv_read_bytes: int = 0  # of the prefix that a pair's prefill worker has read from decode
    kv_reported: bool = False
    repeats: bool = False  # repeats prefill's tokens, which wait in these for a new one:
    repeated_ids: Sequence[int] = ()
    repeated_text: str = ""
    repeated_logprobs: Sequence[TokenLogprob] = ()
    probe_totals: ProbeTotals | None = None  # of the answer's searches
    prefill: bool = field(init=False)
    paired: bool = field(init=False)  # prefill and decode worker have the attempt at once

    def __post_init__(self) -> None:
        self.prefill = self.work.phase is WorkPhase.PREFILL
        self.paired = is_paired(self.work.orchestration)

    def take(self, probe_totals: ProbeTotals) -> None:
        """Set the totals of searches; a notice about passages leaves before any later token."""
        self.probe_totals = probe_totals
        if probe_totals.notice is not None:
            self.columns.add_notice(probe_totals.notice)

    @property
    def ends_request(self) -> bool:
        """Return whether this worker writes the outcome; of a pair, only the decode worker does."""
        return not (self.prefill and self.paired)


def _phase(stream: ActiveRequest, kind: PhaseKind, now_ms: int, **fields: Any) -> Phase:
    """Return a phase of the stream with the prompt's counts; `fields` are fields of Phase."""
    return phase_of(
        stream.work,
        kind,
        stream.started_ms,
        now_ms,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        **fields,
    )


def failed_phase(stream: ActiveRequest, error: WireError, now_ms: int) -> Phase:
    """Return the phase that gives a request back; the router places it again or ends it."""
    return _phase(stream, PhaseKind.FAILED, now_ms, kv_bytes=stream.kv_bytes, error=error)


def allocated_phase(
    stream: ActiveRequest, identity: WorkerIdentity, kv: KvHandle, now_ms: int
) -> Phase:
    """Return the phase that reports decode's blocks for the prompt; a peer will write to them."""
    return _phase(stream, PhaseKind.KV_ALLOCATED, now_ms, kv=with_identity(kv, identity))


def handover_phase(
    stream: ActiveRequest,
    identity: WorkerIdentity,
    kv: KvHandle | None,
    transfer_ms: float,
    now_ms: int,
) -> Phase:
    """Return the phase that ends a prefill; its KV waits for a peer, or is there already."""
    return _phase(
        stream,
        PhaseKind.PREFILL_DONE,
        now_ms,
        sent_tokens=stream.seq,
        sent_chars=stream.chars,
        kv_bytes=stream.kv_bytes,
        transfer_ms=transfer_ms,
        kv=None if kv is None else with_identity(kv, identity),
        kv_read_bytes=stream.kv_read_bytes,
    )


def kv_received_phase(stream: ActiveRequest, transfer_ms: float, now_ms: int) -> Phase:
    """Return the phase that reports that the prompt's KV has arrived."""
    return _phase(
        stream,
        PhaseKind.KV_RECEIVED,
        now_ms,
        kv_bytes=stream.kv_bytes,
        transfer_ms=transfer_ms,
    )


def kv_missed_phase(stream: ActiveRequest, error: WireError, now_ms: int) -> Phase:
    """Return the phase that reports missing KV; this worker computes the prompt."""
    return _phase(stream, PhaseKind.KV_MISSED, now_ms, error=error)


def stream_start(stream: ActiveRequest, identity: WorkerIdentity) -> StreamStart:
    """Return the mode and the workers of the stream, as far as this worker knows them."""
    prefill_worker, decode_worker = _worker_ids(stream, identity)
    return StreamStart(
        request_id=stream.request_id,
        attempt=stream.attempt,
        mode=stream.work.mode,
        orchestration=stream.work.orchestration,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
    )


def outcome_of(
    stream: ActiveRequest,
    identity: WorkerIdentity,
    kind: OutcomeKind,
    now_ms: int,
    *,
    finish_reason: str = "",
    stop_reason: str = "",
    error: WireError | None = None,
    kv: KvHandle | None = None,
) -> tuple[StreamEnd, Outcome]:
    """Return the stream's end and the request's outcome.

    `seq` and `chars` of the end are 0 unless the answer is complete. The gateway then ends after
    the tokens that it has, which may be more than this attempt has repeated so far.
    """
    whole = kind is OutcomeKind.COMPLETED
    prefill_worker, decode_worker = _worker_ids(stream, identity)
    totals = stream.probe_totals or NOTHING
    prompt_tokens = stream.prompt_tokens - stream.prior_tokens
    both: dict[str, Any] = {
        "request_id": stream.request_id,
        "attempt": stream.attempt,
        "kind": kind,
        "finish_reason": finish_reason,
        "error": error,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": min(stream.cached_tokens, prompt_tokens),
        "mode": stream.work.mode,
        "prefill_worker": prefill_worker,
        "decode_worker": decode_worker,
        "kv_bytes": stream.kv_bytes,
        "probes": totals.probes,
        "retrieved_tokens": totals.retrieved_tokens,
        "stalled_ms": totals.stalled_ms,
        "first_token_ms": stream.first_token_ms,
        "worker_ms": float(max(0, now_ms - stream.started_ms)),
    }
    end = StreamEnd(
        seq=stream.seq if whole else 0,
        chars=stream.chars if whole else 0,
        stop_reason=stop_reason,
        **both,
    )
    outcome = Outcome(
        session_id=stream.work.session_id,
        written_by=identity.worker_id,
        completion_tokens=max(stream.seq, stream.first_seq),
        arrived_ms=stream.work.arrived_ms,
        ended_ms=now_ms,
        kv=None if kv is None else with_identity(kv, identity),
        orchestration=stream.work.orchestration,
        **both,
    )
    return end, outcome


def with_identity(kv: KvHandle, identity: WorkerIdentity) -> KvHandle:
    """Return the handle with this worker's name and epoch, which engines do not set."""
    return replace(kv, worker_id=identity.worker_id, worker_epoch=identity.epoch)


def _worker_ids(stream: ActiveRequest, identity: WorkerIdentity) -> tuple[str, str]:
    """Return the ids of prefill and decode worker, as far as this worker knows them."""
    work = stream.work
    if stream.prefill:
        return identity.worker_id, "" if work.kv_target is None else work.kv_target.worker_id
    if work.kv is None:  # the prompt was computed in place
        return identity.worker_id, identity.worker_id
    return work.prefill_worker or work.kv.worker_id, identity.worker_id
