"""The parts that streamed and whole answers share: usage, log-probabilities and Trivium's fields.

The object `trivium` in an answer has the workers that computed it. Pure; the writers add these
parts to their JSON.
"""

from collections.abc import Callable, Sequence
from typing import Any

from schemas.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    QueueFull,
    TriviumError,
    from_wire,
)
from schemas.records import (
    Endpoint,
    OutcomeKind,
    StreamEnd,
    StreamStart,
    TokenLogprob,
    TopLogprob,
)
from streams.calls.ids import CHAT_PREFIX, COMPLETION_PREFIX
from streams.calls.stream import citations
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call
from streams.calls.stream.stream import Stream

Json = dict[str, Any]
TokenName = Callable[[TokenLogprob | TopLogprob], str]

_BY_KIND: dict[OutcomeKind, tuple[type[TriviumError], str]] = {
    OutcomeKind.CANCELLED: (
        Cancelled,
        "the request was cancelled: its client asked so, or a connection broke; answers to calls "
        "with x-trivium-on-disconnect: continue outlive that",
    ),
    OutcomeKind.EXPIRED: (DeadlineExceeded, "the deadline passed before the answer was complete"),
    OutcomeKind.SHED: (QueueFull, "too many requests are waiting; try again later"),
    OutcomeKind.FAILED: (EngineFailed, "the request failed"),
}


def public_id(key: StreamKey) -> str:
    """Return the id of an answer in response bodies."""
    return (CHAT_PREFIX if key.endpoint is Endpoint.CHAT else COMPLETION_PREFIX) + key.parent_id


def end_error(end: StreamEnd) -> TriviumError:
    """Return the error of a stream that ended without an answer."""
    if end.error is not None:
        return from_wire(end.error)
    error, message = _BY_KIND[end.kind]
    return error(message)


def call_error(call: Call) -> TriviumError | None:
    """Return the error that ended a call, or None while it has none."""
    if call.failure is None and call.failed_end is not None:
        return end_error(call.failed_end)
    return call.failure


def usage(streams: Sequence[Stream], prompts: int) -> Json:
    """Count the tokens of all choices; a prompt counts once however many choices it has. Passages
    that probes inserted into answers count with the prompt: the model read and did not generate
    them."""
    per_prompt = len(streams) // prompts
    firsts = [stream.end for stream in streams[::per_prompt] if stream.end is not None]
    put_in = sum(stream.end.retrieved_tokens for stream in streams if stream.end is not None)
    prompt_tokens = sum(end.prompt_tokens for end in firsts) + put_in
    completion_tokens = sum(stream.next_seq for stream in streams)
    details = {"cached_tokens": sum(end.cached_tokens for end in firsts)}
    if any(stream.retrieved for stream in streams):
        notices = [stream.retrieved.get(0) for stream in streams[::per_prompt]]
        details["retrieved_tokens"] = put_in + sum(notice.tokens for notice in notices if notice)
    counts: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }
    ends = [stream.end for stream in streams if stream.end is not None]
    if reasoning_tokens := sum(end.reasoning_tokens for end in ends):
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> Json:
    """Count the tokens of one choice that has not ended."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def placement(key: StreamKey, streams: Sequence[Stream]) -> Json:
    """Return the placement of the last of these choices, and `differs_at` if an attempt repeated
    other tokens."""
    end = [stream.end for stream in streams if stream.end is not None][-1]
    differs = [stream.differs_at for stream in streams if stream.differs_at is not None]
    retrieved = [stream.retrieved for stream in streams if stream.retrieved]
    probes = {"probes": end.probes, "stalled_ms": round(end.stalled_ms, 1)} if end.probes else {}
    return {
        "request_id": end.request_id,
        "session_id": key.session_id,
        "mode": end.mode.value,
        "prefill_worker": end.prefill_worker,
        "decode_worker": end.decode_worker,
        "attempt": end.attempt,
        "kv_bytes": end.kv_bytes,
        **({"differs_at": differs[0]} if differs else {}),
        **probes,
        **({"retrieval": citations.retrieval(retrieved[-1])} if retrieved else {}),
    }


def placement_headers(
    start: StreamStart | None, end: StreamEnd | None
) -> list[tuple[bytes, bytes]]:
    """Return the placement as response headers, without unknown values.

    A stream's headers are sent with its first token, when only its start is known.
    """
    source = start if end is None else end
    if source is None:
        return []
    values = [
        (b"x-trivium-mode", source.mode),
        (b"x-trivium-prefill-worker", source.prefill_worker),
        (b"x-trivium-decode-worker", source.decode_worker),
    ]
    if start is not None and start.attempt == source.attempt:
        values.append((b"x-trivium-orchestration", start.orchestration))
    return [(name, value.encode()) for name, value in values if value not in ("", "none")]


def logprobs(key: StreamKey, tokens: Sequence[TokenLogprob], first_char: int) -> Json | None:
    """Format log-probabilities for the endpoint; `first_char` is the offset of the first token's
    text."""
    if not tokens:
        return None
    name = _id_name if key.names_ids else _text_name
    if key.endpoint is Endpoint.CHAT:
        return chat_logprobs(tokens, name)
    return _completion_logprobs(tokens, first_char, name)


def _text_name(token: TokenLogprob | TopLogprob) -> str:
    return token.token


def _id_name(token: TokenLogprob | TopLogprob) -> str:
    """Name a token as vLLM does with `return_tokens_as_token_ids`."""
    return f"token_id:{token.token_id}"


def chat_logprobs(tokens: Sequence[TokenLogprob], name: TokenName = _text_name) -> Json:
    """Format the log-probabilities of consecutive tokens for chats."""
    return {
        "content": [
            {
                **_chat_token(name(token), token.logprob),
                "top_logprobs": [_chat_token(name(top), top.logprob) for top in token.top],
            }
            for token in tokens
        ]
    }


def _chat_token(token: str, logprob: float) -> Json:
    return {
        "token": token,
        "logprob": max(logprob, -9999.0),
        "bytes": list(token.encode("utf-8", "replace")),
    }


def _completion_logprobs(tokens: Sequence[TokenLogprob], first_char: int, name: TokenName) -> Json:
    offsets, at = [], first_char
    for token in tokens:
        offsets.append(at)
        at += len(token.token)
    return {
        "tokens": [name(token) for token in tokens],
        "token_logprobs": [max(token.logprob, -9999.0) for token in tokens],
        "top_logprobs": [  # includes the sampled token, even an unlikely one
            {name(top): max(top.logprob, -9999.0) for top in token.top}
            | {name(token): max(token.logprob, -9999.0)}
            for token in tokens
        ],
        "text_offset": offsets,
    }
