"""What clients and workers say in tests: bodies of calls, frames, ends, and what events mean."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from schemas.records import (
    AnswerDelta,
    Mode,
    OutcomeKind,
    StreamDeltas,
    StreamEnd,
    StreamLogprobs,
    TokenFrame,
    WireError,
)

MODEL = "test-model"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def message(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    """A body in Anthropic's form."""
    turns = [{"role": "user", "content": content}]
    return {"model": MODEL, "max_tokens": 16, "messages": turns, **fields}


def frame(
    request_id: str,
    texts: list[str],
    *,
    attempt: int = 1,
    first_seq: int = 0,
    first_char: int = 0,
    end: StreamEnd | None = None,
    logprobs: list[StreamLogprobs] | None = None,
) -> TokenFrame:
    """One row of one stream, one token per text."""
    return TokenFrame(
        worker_id="decode-1",
        at_ms=0,
        request_ids=[request_id] if texts else [],
        attempts=[attempt] if texts else [],
        first_seqs=[first_seq] if texts else [],
        first_chars=[first_char] if texts else [],
        token_counts=[len(texts)] if texts else [],
        token_ids=[100 + first_seq + i for i in range(len(texts))],
        texts=["".join(texts)] if texts else [],
        logprobs=logprobs or [],
        ends=[end] if end is not None else [],
    )


def stream_end(
    request_id: str,
    texts: Sequence[str] = (),
    *,
    attempt: int = 1,
    kind: OutcomeKind = OutcomeKind.COMPLETED,
    error: WireError | None = None,
    finish_reason: str = "stop",
    **fields: Any,
) -> StreamEnd:
    """The last word after these texts."""
    defaults: dict[str, Any] = {
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "mode": Mode.REMOTE,
        "prefill_worker": "prefill-1",
        "decode_worker": "decode-1",
    }
    return StreamEnd(
        request_id=request_id,
        attempt=attempt,
        seq=len(texts),
        chars=len("".join(texts)),
        kind=kind,
        finish_reason=finish_reason,
        error=error,
        **(defaults | fields),
    )


def parsed_frame(request_id: str, *deltas: AnswerDelta, **end: Any) -> TokenFrame:
    """One token that is parsed to these deltas, and the end of its stream."""
    row = StreamDeltas(request_id=request_id, attempt=1, first_seq=0, deltas=deltas)
    last = replace(stream_end(request_id, **end), seq=1)
    return replace(frame(request_id, [""], end=last), deltas=[row])


def events_of(text: str) -> list[Any]:
    """The data of each event; JSON where it is."""
    events: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def text_of(events: list[Any]) -> str:
    """The answer that the chunks of a chat's first choice spell."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices", [])
        if choice["index"] == 0
    )
