"""Parsed answers of tests: what workers with parsers write."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from schemas.model.parsers import ParserNames
from schemas.records import AnswerDelta, DeltaKind, Request, StreamDeltas, TokenFrame
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import frame, stream_end
from tests.streams.gateway.small_tokenizer import tokenizer

PARSERS = ParserNames(tool="hermes", reasoning="qwen3")
Pieces = Sequence[Sequence[AnswerDelta]]  # by token


def content(text: str, seq: int = 0) -> AnswerDelta:
    return AnswerDelta(seq=seq, kind=DeltaKind.CONTENT, text=text)


def reasoning(text: str, seq: int = 0) -> AnswerDelta:
    return AnswerDelta(seq=seq, kind=DeltaKind.REASONING, text=text)


def called(text: str, index: int = 0, name: str = "") -> AnswerDelta:
    """More of the arguments of a call; with a name, its first delta."""
    call_id = f"call_{index}" if name else ""
    return AnswerDelta(
        seq=0, kind=DeltaKind.CALL, text=text, index=index, call_id=call_id, name=name
    )


THINKS_AND_CALLS: Pieces = (
    [reasoning("I ")],
    [],
    [reasoning("look.")],
    [content("\n\n")],
    [content("Let me "), content("see.")],
    [content("\n"), called("", 0, "read"), called('{"pa', 0)],
    [called('th": "a"}', 0)],
    [called("{}", 1, "list")],
)


def frames_of(request: Request, pieces: Pieces, **end: Any) -> list[TokenFrame]:
    """A frame for each token, then the end."""
    name, frames = request.request_id, []
    for seq, deltas in enumerate(pieces):
        due = [replace(delta, seq=seq + 1) for delta in deltas]
        row = frame(name, [""], first_seq=seq)
        entry = StreamDeltas(request_id=name, attempt=1, first_seq=seq, deltas=due)
        frames.append(replace(row, deltas=[entry] if due else []))
    texts = [""] * len(pieces)
    frames.append(frame(name, [], end=stream_end(name, texts, **end)))
    return frames


def parsing_gateway(pieces: Pieces = THINKS_AND_CALLS, **end: Any) -> InProcessGateway:
    """A gateway whose log answers every request with these pieces, a frame for each token."""
    gateway = InProcessGateway(parsers=PARSERS)
    end = {"finish_reason": "tool_calls", "reasoning_tokens": 3} | end
    gateway.log.on_request = parsed_answer(gateway, pieces, **end)
    return gateway


def parsed_answer(
    gateway: InProcessGateway, pieces: Pieces, **end: Any
) -> Callable[[Request], None]:
    """What answers every request of a gateway with these pieces."""

    def answer(request: Request) -> None:
        loop = asyncio.get_running_loop()
        frames = frames_of(request, pieces, **end)
        gateway.log.frames += frames
        for token_frame in frames:
            loop.call_soon(gateway.log.hub.apply, token_frame, loop.time())

    return answer


def prompt_of(gateway: InProcessGateway, at: int = -1) -> str:
    """The text of the prompt that a request has."""
    return tokenizer().text(unpack_tokens(gateway.log.requests[at].prompt_tokens))
