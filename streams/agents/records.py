"""Builds the records that only agents make: frames of a router, and phases of unsent work.

The core knows neither gateways' streams nor the log's limits of size. Called by
`streams/agents/outbox.py`.
"""

from collections.abc import Sequence

from schemas.errors import RecordTooLarge
from schemas.records import (
    Phase,
    PhaseKind,
    StreamEnd,
    StreamRetrieved,
    StreamVoid,
    TokenFrame,
    Work,
)
from schemas.rules.phases import phase_of
from streams.core.effects import Dispatch, Effect, End


def unsent_phase(effect: Effect | object, error: BaseException, now_ms: int) -> Phase | None:
    """Return a failed phase in place of a worker whose work could not be sent; retries cannot help.

    Return None if the effect is not work: then there is no substitute, and the router must end.
    """
    if not isinstance(effect, Dispatch) or not isinstance(effect.record, Work):
        return None
    work = effect.record
    why = RecordTooLarge(f"{work.request_id}: its work was not sent: {error}").to_wire()
    return phase_of(work, PhaseKind.FAILED, now_ms, now_ms, error=why)


def end_frame(end: End, router_id: str, now_ms: int) -> TokenFrame:
    """Return an answer's end for the gateway; seq and chars of 0 mean what the gateway has."""
    outcome = end.outcome
    last = StreamEnd(
        request_id=outcome.request_id,
        attempt=outcome.attempt,
        seq=0,
        chars=0,
        kind=outcome.kind,
        error=outcome.error,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        mode=outcome.mode,
        prefill_worker=outcome.prefill_worker,
        decode_worker=outcome.decode_worker,
    )
    return _frame(router_id, now_ms, ends=(last,))


def retrieved_frame(retrieved: StreamRetrieved, router_id: str, now_ms: int) -> TokenFrame:
    """Return the notice of a prompt's passages, which precedes its first token."""
    return _frame(router_id, now_ms, retrieved=(retrieved,))


def void_frame(void: StreamVoid, router_id: str, now_ms: int) -> TokenFrame:
    """Return the mark that an attempt of an answer is void."""
    return _frame(router_id, now_ms, voids=(void,))


def _frame(
    router_id: str,
    now_ms: int,
    *,
    ends: Sequence[StreamEnd] = (),
    retrieved: Sequence[StreamRetrieved] = (),
    voids: Sequence[StreamVoid] = (),
) -> TokenFrame:
    """Return a frame that carries no tokens."""
    return TokenFrame(
        worker_id=router_id,
        at_ms=now_ms,
        request_ids=(),
        attempts=(),
        first_seqs=(),
        first_chars=(),
        token_counts=(),
        token_ids=(),
        texts=(),
        ends=ends,
        retrieved=retrieved,
        voids=voids,
    )
