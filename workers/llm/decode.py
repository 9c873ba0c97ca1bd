"""Handles a decode job's outputs: tokens that prefill has already sent, received KV, and the end.

The work of a replica worker is a decode job without KV, so it has no module of its own. Pure;
called by `workers/llm/active_requests.py`.
"""

from schemas.records import Outcome, Phase, StreamEnd
from workers.llm.engine import Output
from workers.llm.prefill import whole_or_failed
from workers.llm.stream import ActiveRequest, WorkerIdentity, kv_received_phase


def append_row(stream: ActiveRequest, output: Output, text: str, seq: int, chars: int) -> None:
    """Append an output that repeats prefill's tokens, or that has log-probabilities.

    Decode samples the first token again, and the gateway compares it with prefill's. Repeated
    tokens wait here for the first new one, so that they need no frame of their own.
    """
    ids, full_text = [*stream.repeated_ids, *output.token_ids], stream.repeated_text + text
    logprobs = [*stream.repeated_logprobs, *output.logprobs]
    is_new = seq + len(output.token_ids) > stream.first_seq or chars + len(text) > stream.first_char
    if stream.repeats and not is_new and not output.finish_reason:
        stream.repeated_ids, stream.repeated_text, stream.repeated_logprobs = (
            ids,
            full_text,
            logprobs,
        )
        return
    first_seq, first_char = seq - len(stream.repeated_ids), chars - len(stream.repeated_text)
    later, stream.repeats = stream.repeats, False
    stream.repeated_ids, stream.repeated_text, stream.repeated_logprobs = (), "", ()
    if not ids and not full_text:
        return
    stream.columns.row(
        stream.request_id, stream.attempt, first_seq, first_char, ids, full_text, later=later
    )
    if logprobs:
        stream.columns.add_logprobs(stream.request_id, logprobs)


def received_phase(stream: ActiveRequest, output: Output, now_ms: int) -> Phase | None:
    """Return the phase `kv_received` of a decode job, the first time; otherwise None.

    A prefill job reports its bytes when it is done; that of a pair, those read and those written.
    """
    if stream.prefill:
        if stream.paired and not output.finish_reason:
            stream.kv_read_bytes = output.kv_bytes
        else:
            stream.kv_bytes = output.kv_bytes
        return None
    if stream.kv_reported or stream.work.kv is None:
        return None
    stream.kv_reported = True
    stream.kv_bytes = output.kv_bytes
    return kv_received_phase(stream, output.transfer_ms, now_ms)


def finish(
    stream: ActiveRequest, output: Output, identity: WorkerIdentity, now_ms: int
) -> Phase | tuple[StreamEnd, Outcome]:
    """Return the records for the last output of a decode job."""
    return whole_or_failed(stream, output, identity, now_ms, output.kv)
