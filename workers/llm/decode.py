"""What the outputs of a decode job mean: what was sent already, KV that arrived, and the end.

A replica's work is a decode job without KV, so it has no file of its own. Pure; called by
`workers/llm/held.py`.
"""

from schemas.records import KvHandle, Outcome, OutcomeKind, Phase, StreamEnd, Work
from workers.llm.engine import Output
from workers.llm.prefill import WHOLE, unexpected
from workers.llm.stream import Identity, Stream, ended, failed, kv_received


def usable_kv(work: Work, me: Identity, now_ms: int) -> KvHandle | None:
    """The handle to fetch; none computes the prompt in place.

    A late handle is never read, because its blocks may hold another prompt by now, and a worker
    does not fetch from itself: what it computed is in its own cache.
    """
    kv = work.kv
    if kv is None or kv.expires_at_ms <= now_ms or kv.worker_id == me.worker_id:
        return None
    return kv


def clipped_row(stream: Stream, output: Output, seq: int, chars: int) -> None:
    """Append what of an output the prefill worker has not sent.

    Tokens and characters are cut apart from each other, since text may lag its tokens.
    """
    skip = max(0, stream.first_seq - seq)
    token_ids = output.token_ids[skip:]
    text = output.text[max(0, stream.first_char - chars) :]
    if token_ids or text:
        seq = max(seq, min(stream.first_seq, seq + len(output.token_ids)))
        chars = max(chars, min(stream.first_char, chars + len(output.text)))
        stream.columns.row(stream.request_id, stream.attempt, seq, chars, token_ids, text)
    if output.logprobs[skip:]:
        stream.columns.add_logprobs(stream.request_id, stream.attempt, seq, output.logprobs[skip:])


def received(stream: Stream, output: Output, me: Identity, now_ms: int) -> Phase | None:
    """The phase that says that the KV arrived, the first time."""
    if stream.kv_reported or stream.work.kv is None:
        return None
    stream.kv_reported = True
    stream.kv_bytes = output.kv_bytes
    return kv_received(stream, me, output.transfer_ms, now_ms)


def finish(
    stream: Stream, output: Output, me: Identity, now_ms: int
) -> Phase | tuple[StreamEnd, Outcome]:
    """The record of the last output of a decode job."""
    if output.finish_reason in WHOLE:
        return ended(
            stream,
            me,
            OutcomeKind.COMPLETED,
            now_ms,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
    return failed(stream, me, output.error or unexpected(stream, output).to_wire(), now_ms)
