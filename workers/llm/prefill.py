"""What the end of a prefill job means: a hand-over, a whole answer of one token, or a failure.

In a pair it is never an answer: the decode worker finds the same end and writes the outcome.
Pure; called by `workers/llm/active_requests.py`, which sends what is returned.
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
    """The text of a prefill output that no later token can take back; whole at an answer's end."""
    if output.finish_reason in WHOLE:
        return output.text
    return certain_text(output.text, stream.work.sampling)


def finish(
    stream: ActiveRequest, output: Output, identity: WorkerIdentity, now_ms: int
) -> Phase | tuple[StreamEnd, Outcome]:
    """The record of the last output of a prefill job."""
    if stream.paired:
        is_handover = output.finish_reason in ("handover", *WHOLE)
    else:
        is_handover = output.finish_reason == "handover" and output.kv is not None
    if is_handover:
        return handover_phase(stream, identity, output.kv, output.transfer_ms, now_ms)
    return whole_or_failed(stream, output, identity, now_ms)  # whole: the answer needed no decode


def whole_or_failed(
    stream: ActiveRequest,
    output: Output,
    identity: WorkerIdentity,
    now_ms: int,
    kv: KvHandle | None = None,
) -> Phase | tuple[StreamEnd, Outcome]:
    """The records of an answer that is whole, or the phase of one that is not."""
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
    """The error of an end that the engine did not explain."""
    return EngineFailed(
        f"request {stream.request_id}: {stream.work.phase} ended with {output.finish_reason!r}"
        f"{' and no KV handle' if output.finish_reason == 'handover' else ''}"
    )
