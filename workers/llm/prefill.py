"""Decides what the end of a prefill job is: a hand-over, a complete answer, or a failure.

In a pair it is never an answer: the decode worker reaches the same end and writes the outcome.
Pure; called by `workers/llm/active_requests.py`, which sends the returned records.
"""

from schemas.errors import EngineFailed
from schemas.records import KvHandle, Outcome, OutcomeKind, Phase, StreamEnd
from workers.llm.engine import Output
from workers.llm.stop_strings import certain_text
from workers.llm.stream import (
    ActiveRequest,
    WorkerIdentity,
    failed_phase,
    handover_phase,
    outcome_of,
)

WHOLE = ("stop", "length")


def decided_text(stream: ActiveRequest, output: Output) -> str:
    """Return the text of a prefill output that no later token can cut; all of it at the end."""
    if output.finish_reason in WHOLE:
        return output.text
    return certain_text(output.text, stream.work.sampling)


def finish(
    stream: ActiveRequest, output: Output, identity: WorkerIdentity, now_ms: int
) -> Phase | tuple[StreamEnd, Outcome]:
    """Return the records for the last output of a prefill job."""
    if stream.paired:
        is_handover = output.finish_reason in ("handover", *WHOLE)
    else:
        is_handover = output.finish_reason == "handover" and output.kv is not None
    if is_handover:
        return handover_phase(stream, identity, output.kv, output.transfer_ms, now_ms)
    return whole_or_failed(stream, output, identity, now_ms)  # an answer of one token is complete


def whole_or_failed(
    stream: ActiveRequest,
    output: Output,
    identity: WorkerIdentity,
    now_ms: int,
    kv: KvHandle | None = None,
) -> Phase | tuple[StreamEnd, Outcome]:
    """Return the records of a complete answer, or the phase of a failed one."""
    if output.finish_reason in WHOLE:
        return outcome_of(
            stream,
            identity,
            OutcomeKind.COMPLETED,
            now_ms,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            kv=kv,
        )
    return failed_phase(stream, output.error or unexpected(stream, output).to_wire(), now_ms)


def unexpected(stream: ActiveRequest, output: Output) -> EngineFailed:
    """Return the error for an end that the engine did not explain."""
    return EngineFailed(
        f"request {stream.request_id}: {stream.work.phase} ended with {output.finish_reason!r}"
        f"{' and no KV handle' if output.finish_reason == 'handover' else ''}"
    )
