"""A request that a worker holds, and the records that tell of it.

Pure builders; which record is due when is decided by `prefill.py`, `decode.py` and `held.py`.
"""

from dataclasses import dataclass

from schemas.log.clients import Headers
from schemas.records import (
    KvHandle,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    StreamEnd,
    WireError,
    Work,
    WorkPhase,
)
from workers.frames import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this worker is, in this life."""

    worker_id: str
    epoch: int


@dataclass(slots=True, kw_only=True)
class Stream:
    """One phase of a request on this worker; `seq` and `chars` count from the answer's start."""

    work: Work
    job_id: str  # the request's id inside the engine: attempts must not meet there
    columns: Columns
    headers: Headers
    prompt_tokens: int
    started_ms: int
    request_id: str
    attempt: int
    first_seq: int  # tokens and characters before these were sent by the prefill worker
    first_char: int
    first_token_ms: int
    seq: int = 0
    chars: int = 0
    cached_tokens: int = 0
    kv_bytes: int = 0
    kv_reported: bool = False

    @property
    def prefill(self) -> bool:
        return self.work.phase is WorkPhase.PREFILL


def phase(
    work: Work, me: Identity, kind: PhaseKind, started_ms: int, now_ms: int, **more: object
) -> Phase:
    """A phase of a request on this worker."""
    return Phase(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        router_id=work.router_id,
        worker_id=me.worker_id,
        worker_epoch=me.epoch,
        kind=kind,
        started_ms=started_ms,
        ended_ms=now_ms,
        **more,  # type: ignore[arg-type]  # the callers below name fields of Phase
    )


def failed(stream: Stream, me: Identity, error: WireError, now_ms: int) -> Phase:
    """The worker gives the request back; the router places it again or ends it."""
    return phase(
        stream.work,
        me,
        PhaseKind.FAILED,
        stream.started_ms,
        now_ms,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        kv_bytes=stream.kv_bytes,
        error=error,
    )


def handed_over(stream: Stream, me: Identity, kv: KvHandle, now_ms: int) -> Phase:
    """Prefill is done and its KV waits for a peer."""
    return phase(
        stream.work,
        me,
        PhaseKind.PREFILL_DONE,
        stream.started_ms,
        now_ms,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        sent_tokens=stream.seq,
        sent_chars=stream.chars,
        kv=kv,
    )


def kv_received(stream: Stream, me: Identity, transfer_ms: float, now_ms: int) -> Phase:
    """The prompt's KV has arrived."""
    return phase(
        stream.work,
        me,
        PhaseKind.KV_RECEIVED,
        stream.started_ms,
        now_ms,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        kv_bytes=stream.kv_bytes,
        transfer_ms=transfer_ms,
    )


def ended(
    stream: Stream,
    me: Identity,
    kind: OutcomeKind,
    now_ms: int,
    *,
    finish_reason: str = "",
    stop_reason: str = "",
    error: WireError | None = None,
) -> tuple[StreamEnd, Outcome]:
    """The last word to the client and the outcome.

    Only a whole answer is counted in the last word: zero tells the gateway to end after what it
    has, which may be more than this attempt has repeated so far.
    """
    whole = kind is OutcomeKind.COMPLETED
    prefill_worker, decode_worker = _who(stream, me)
    end = StreamEnd(
        request_id=stream.request_id,
        attempt=stream.attempt,
        seq=stream.seq if whole else 0,
        chars=stream.chars if whole else 0,
        kind=kind,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        mode=stream.work.mode,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        kv_bytes=stream.kv_bytes,
    )
    outcome = Outcome(
        request_id=stream.request_id,
        session_id=stream.work.session_id,
        attempt=stream.attempt,
        kind=kind,
        finish_reason=finish_reason,
        error=error,
        written_by=me.worker_id,
        mode=stream.work.mode,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=max(stream.seq, stream.first_seq),
        cached_tokens=stream.cached_tokens,
        kv_bytes=stream.kv_bytes,
        arrived_ms=stream.work.arrived_ms,
        first_token_ms=stream.first_token_ms,
        ended_ms=now_ms,
    )
    return end, outcome


def _who(stream: Stream, me: Identity) -> tuple[str, str]:
    if stream.prefill:
        return me.worker_id, ""
    if stream.work.kv is None:  # the prompt was computed in place
        return me.worker_id, me.worker_id
    return stream.work.prefill_worker, me.worker_id
