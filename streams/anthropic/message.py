"""An answer in Anthropic's form: the message, its usage, and why it stopped.

Pure. All of it follows from the call's stream, so that all gateways report the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from schemas.records import AnswerDelta, DeltaKind, StreamEnd
from streams.anthropic.content import AnswerContent, AnswerPiece, BlockKind, Json
from streams.calls.ids import MESSAGE_PREFIX
from streams.calls.stream import answers
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call, CallStream

_KINDS = {
    DeltaKind.CONTENT: BlockKind.TEXT,
    DeltaKind.REASONING: BlockKind.THINKING,
    DeltaKind.CALL: BlockKind.TOOL_USE,
}


def message_id(key: StreamKey) -> str:
    """Return the id of a message."""
    return MESSAGE_PREFIX + key.parent_id


def new_pieces(stream: CallStream) -> Iterator[AnswerPiece]:
    """Yield what is new since the last call, in the order of the log."""
    deltas, stream.deltas = stream.deltas, []
    yield from _pieces(stream.drain(), deltas)


def _pieces(text: str, deltas: Sequence[AnswerDelta]) -> Iterator[AnswerPiece]:
    if text:
        yield AnswerPiece(BlockKind.TEXT, text)
    for delta in deltas:
        yield AnswerPiece(_KINDS[delta.kind], delta.text, delta.call_id, delta.name, delta.index)


def message_of(key: StreamKey, content: list[Json], **fields: Any) -> Json:
    """Return a message; `fields` are those that its end adds."""
    return {
        "id": message_id(key),
        "type": "message",
        "role": "assistant",
        "model": key.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        **fields,
    }


def usage_of(stream: CallStream) -> Json:
    """Count the tokens of an answer; `input_tokens` are those that no cache had."""
    counts = answers.usage([stream], 1)
    cached_tokens = counts["prompt_tokens_details"]["cached_tokens"]
    usage: Json = {
        "input_tokens": counts["prompt_tokens"] - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": counts["completion_tokens"],
    }
    if details := counts.get("completion_tokens_details"):
        usage["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    return usage


def usage_at_start(prompt_tokens: int) -> Json:
    """Count the tokens of an answer that begins: what the caches had is not known yet."""
    return {"input_tokens": prompt_tokens, "output_tokens": 1, "service_tier": "standard"}


def stop_fields(
    stream: CallStream, end: StreamEnd, content: AnswerContent, tokens_max: int
) -> Json:
    """Return why a message stopped. `tokens_max` is the size of the model's context."""
    reason, sequence = "end_turn", None
    if end.finish_reason == "length":
        tokens = end.prompt_tokens + end.retrieved_tokens + stream.next_seq
        is_full = tokens >= tokens_max
        reason = "model_context_window_exceeded" if is_full else "max_tokens"
    elif any(block.kind is BlockKind.TOOL_USE for block in content.blocks):
        reason = "tool_use"
    elif end.stop_reason and not end.stop_reason.isdigit():
        # Digits are the id of a token that ends answers of the model.
        reason, sequence = "stop_sequence", end.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def whole_message(call: Call, tokens_max: int) -> tuple[bytes, AnswerContent]:
    """Return the body of a message whose stream has ended, and its content."""
    (stream,) = call.streams
    end = stream.end
    assert end is not None
    content = AnswerContent(call.key.parent_id)
    blocks = content.whole(_pieces("".join(stream.texts), stream.deltas))
    message = message_of(
        call.key,
        blocks,
        **stop_fields(stream, end, content, tokens_max),
        usage=usage_of(stream) | {"service_tier": "standard"},
        trivium=answers.placement(call.key, [stream]),
    )
    return orjson.dumps(message), content
