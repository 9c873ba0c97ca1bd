"""Gateways that answer calls of /v1/responses at once, and what their clients see."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from schemas.records import Citation, OutcomeKind, Request, StreamRetrieved
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import MODEL, events_of, frame, stream_end

TEXTS = ["Pier", " ", "sev", "en", "."]
RESPONSE = TypeAdapter(Response)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PASSAGES = (
    Citation(passage_id="ferry#0", document_id="ferry", title="Ferries", text="Pier 7.", score=0.9),
    Citation(passage_id="ferry#1", document_id="ferry", title="Ferries", text="Daily.", score=0.5),
    Citation(passage_id="map#3", document_id="map", source="map.md", text="North.", score=0.4),
)


def body(text: Any = "where?", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, **fields}


def answering(
    *texts: str,
    kind: OutcomeKind = OutcomeKind.COMPLETED,
    citations: Sequence[Citation] = PASSAGES,
    **settings: Any,
) -> InProcessGateway:
    """Its log answers every request with these texts, a frame for each."""
    gateway = InProcessGateway(**settings)
    gateway.log.on_request = lambda request: answer(
        gateway, request, texts or TEXTS, kind=kind, citations=citations
    )
    return gateway


def answer(
    gateway: InProcessGateway,
    request: Request,
    texts: Sequence[str] = TEXTS,
    *,
    citations: Sequence[Citation] = PASSAGES,
    **end: Any,
) -> None:
    """The frames of an answer, on the log and at the gateway."""
    name, frames = request.request_id, []
    for seq, text in enumerate(texts):
        before = len("".join(texts[:seq]))
        frames.append(frame(name, [text], first_seq=seq, first_char=before))
    frames.append(frame(name, [], end=stream_end(name, texts, **end)))
    if request.retrieval is not None:
        retrieved = StreamRetrieved(
            request_id=name, collection=request.retrieval.collection, citations=citations, tokens=9
        )
        frames[0] = replace(frames[0], retrieved=[retrieved])
    loop = asyncio.get_running_loop()
    gateway.log.frames += frames
    for token_frame in frames:
        loop.call_soon(gateway.log.hub.apply, token_frame, loop.time())


def beside(gateway: InProcessGateway, **settings: Any) -> InProcessGateway:
    """Another gateway of the same deployment."""
    second_gateway = InProcessGateway(partition=1, **settings)
    second_gateway.log.frames, second_gateway.log.news = gateway.log.frames, gateway.log.news
    second_gateway.state.responses = gateway.log.responses
    return second_gateway


def checked(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each as OpenAI's types have it, their numbers rising."""
    events: list[dict[str, Any]] = events_of(text)
    for event in events:
        EVENT.validate_python(event)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    return events


def spelled(events: Sequence[dict[str, Any]]) -> str:
    """The text that deltas spell."""
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    return "".join(deltas)
