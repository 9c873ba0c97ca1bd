"""What the outputs of a decode job mean: what was sent already, KV that arrived, and the end.

A replica's work is a decode job without KV, so it has no file of its own. Pure; called by
`workers/llm/held.py`.
"""

from schemas.records import Outcome, Phase, StreamEnd
from workers.llm.engine import Output
from workers.llm.prefill import whole_or_failed
from workers.llm.stream import Identity, Stream, kv_received


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
        stream.columns.add_logprobs(stream.request_id, output.logprobs[skip:])


def received(stream: Stream, output: Output, me: Identity, now_ms: int) -> Phase | None:
    """The phase that says that the KV arrived, the first time.

    Prefill has none: it tells the bytes when it is done, of a pair what it read and what it wrote.
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
    return kv_received(stream, me, output.transfer_ms, now_ms)


def finish(
    stream: Stream, output: Output, me: Identity, now_ms: int
) -> Phase | tuple[StreamEnd, Outcome]:
    """The record of the last output of a decode job."""
    return whole_or_failed(stream, output, me, now_ms, output.kv)
