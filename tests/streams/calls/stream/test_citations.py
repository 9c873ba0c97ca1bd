"""What answers say of the passages in their prompt, whole and streamed, and to whom resumes."""

import asyncio
from dataclasses import replace
from typing import Any

from schemas.records import Citation, Request, StreamRetrieved, TokenFrame, WireError
from streams.calls.stream.stream import Stream
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, events_of, frame, stream_end, text_of
from tests.streams.gateway.streamed_call import WITH_IDS


def cited(passage_id: str, score: float, text: str, title: str = "", source: str = "") -> Citation:
    return Citation(
        passage_id=passage_id,
        document_id=passage_id.partition("#")[0],
        title=title,
        source=source,
        text=text,
        score=score,
    )


FOUND = (
    cited("pier#0", 0.5, "From pier 7.", "Ferries", "ferries.md"),
    cited("pier#1", 0.4, "Daily.", "Ferries", "ferries.md"),
    cited("oak#0", 0.3, "An oak."),
)
ASKED = {"retrieval": {"collection": "town"}}


def answering(gateway: InProcessGateway, retrieved: Any, repeats: int = 1) -> None:
    """Answer every request with what was found first, as its router tells it."""

    def answer(request: Request) -> None:
        stream_record = StreamRetrieved(
            request_id=request.request_id, collection="town", **retrieved
        )
        frames = [
            replace(frame(request.request_id, []), retrieved=[stream_record])
            for _ in range(repeats)
        ]
        end = stream_end(request.request_id, ["Pier", " 7"])
        frames.append(frame(request.request_id, ["Pier", " 7"], end=end))
        gateway.log.frames += frames
        for token_frame in frames:
            gateway.log.hub.apply(token_frame, asyncio.get_running_loop().time())

    gateway.log.on_request = answer


async def test_answer_cites_each_document_once() -> None:
    gateway = InProcessGateway()
    answering(gateway, {"citations": FOUND, "tokens": 21}, repeats=2)
    _, answer = await call(gateway, chat("where", **ASKED))
    cited = answer["choices"][0]["message"]["annotations"]
    assert [annotation["url_citation"] for annotation in cited] == [
        {"start_index": 0, "end_index": 6, "title": "Ferries", "url": "ferries.md"},
        {"start_index": 0, "end_index": 6, "title": "oak", "url": "oak"},
    ]
    retrieval = answer["trivium"]["retrieval"]
    assert (retrieval["collection"], retrieval["tokens"], retrieval["missing_shards"]) == (
        "town",
        21,
        0,
    )
    assert [citation["passage_id"] for citation in retrieval["citations"]] == [
        "pier#0",
        "pier#1",
        "oak#0",
    ]
    assert retrieval["citations"][0]["text"] == "From pier 7."
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "retrieved_tokens": 21}


async def test_stream_cites_documents_at_end() -> None:
    gateway = InProcessGateway()
    answering(gateway, {"citations": FOUND, "tokens": 21})
    body = chat("where", stream=True, stream_options={"include_usage": True}, **ASKED)
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=body)
    events = events_of(response.text)
    assert text_of(events) == "Pier 7"
    last = next(e for e in events if e["choices"] and e["choices"][0]["finish_reason"])
    assert len(last["choices"][0]["delta"]["annotations"]) == 2
    assert len(last["trivium"]["retrieval"]["citations"]) == 3
    assert events[-2]["usage"]["prompt_tokens_details"]["retrieved_tokens"] == 21


async def test_answer_reports_failed_retrieval() -> None:
    gateway = InProcessGateway()
    late = WireError(code="deadline_exceeded", message="too late", retriable=True)
    answering(gateway, {"error": late, "missing_shards": 1})
    _, answer = await call(gateway, chat("where", **ASKED))
    assert "annotations" not in answer["choices"][0]["message"]
    retrieval = answer["trivium"]["retrieval"]
    assert retrieval["error"] == {"code": "deadline_exceeded", "message": "too late"}
    assert (retrieval["citations"], retrieval["missing_shards"]) == ([], 1)


async def test_answer_without_retrieval_has_no_citations() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a")
    _, answer = await call(gateway, chat("where"))
    assert "retrieval" not in answer["trivium"]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def probing(gateway: InProcessGateway) -> None:
    """Answer as a router and a worker tell it whose first two probes brought something."""

    def answer(request: Request) -> None:
        def probe_frame(probe: int, seq: int, *citations: Citation) -> TokenFrame:
            retrieved = StreamRetrieved(
                request_id=request.request_id,
                collection="town",
                citations=citations,
                tokens=20 + probe,
                probe=probe,
                seq=seq,
            )
            return replace(frame(request.request_id, []), retrieved=[retrieved])

        end = stream_end(request.request_id, TEXTS, probes=3, retrieved_tokens=43, stalled_ms=12.34)
        rows = [
            frame(request.request_id, TEXTS[i : i + 1], first_seq=i, first_char=2 * i)
            for i in range(3)
        ]
        frames = [
            probe_frame(0, 0, FOUND[0]), rows[0], probe_frame(1, 1, FOUND[1]), rows[1],
            probe_frame(1, 1, FOUND[2]), probe_frame(2, 2, FOUND[2]), replace(rows[2], ends=[end]),
        ]  # fmt: skip
        gateway.log.frames += frames
        for token_frame in frames:
            gateway.log.hub.apply(token_frame, asyncio.get_running_loop().time())

    gateway.log.on_request = answer


TEXTS = ["a ", "b ", "c "]
PROBED = {"retrieval": {"collection": "town", "probes": 1}}
PLACES = [("pier#0", 0, 0), ("pier#1", 1, 1), ("oak#0", 2, 2)]


def places(trivium: Any) -> list[tuple[str, int, int]]:
    cited = trivium["retrieval"]["citations"]
    return [
        (citation["passage_id"], citation["probe"], citation["before_token"]) for citation in cited
    ]


async def test_answer_cites_passages_of_probes_with_positions() -> None:
    """Passages that a later attempt repeats are cited once."""
    gateway = InProcessGateway()
    probing(gateway)
    _, answer = await call(gateway, chat("where", **PROBED))
    assert places(answer["trivium"]) == PLACES
    assert (answer["trivium"]["probes"], answer["trivium"]["stalled_ms"]) == (3, 12.3)
    assert answer["trivium"]["retrieval"]["tokens"] == 20 + 21 + 22
    assert len(answer["choices"][0]["message"]["annotations"]) == 2
    assert answer["usage"] == {
        "prompt_tokens": 7 + 43,
        "completion_tokens": 3,
        "total_tokens": 7 + 43 + 3,
        "prompt_tokens_details": {"cached_tokens": 4, "retrieved_tokens": 20 + 43},
    }


async def test_resumed_stream_cites_all_probe_passages() -> None:
    gateway = InProcessGateway()
    probing(gateway)
    body = chat("where", stream=True, stream_options={"include_usage": True}, **PROBED)
    second_gateway = InProcessGateway(partition=1)
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=body, headers=WITH_IDS)
    events = events_of(response.text)
    assert places(events[-2]["trivium"]) == PLACES
    assert response.text.startswith("id: ")
    second_gateway.log.frames = gateway.log.frames
    for line in response.text.splitlines():
        if line.startswith("id: "):
            async with second_gateway.client() as client:
                path = f"/v1/requests/{response.headers['x-request-id']}/events"
                headers = {"Last-Event-ID": line.removeprefix("id: ")}
                rest = events_of((await client.get(path, headers=headers)).text)
            assert rest[-2]["usage"] == events[-2]["usage"]
            assert places(rest[-2]["trivium"]) == PLACES


async def test_stream_ignores_probe_numbers_over_limit() -> None:
    stream = Stream("r1")
    for probe in range(1_000):
        stream.note_retrieved(StreamRetrieved(request_id="r1", collection="town", probe=probe))
    assert len(stream.retrieved) == 65


async def test_answer_reports_degraded_retrieval() -> None:
    gateway = InProcessGateway()
    answering(gateway, {"citations": FOUND[:1], "degraded": "no embedding worker is ready"})
    _, answer = await call(gateway, chat("where", **ASKED))
    assert answer["trivium"]["retrieval"]["degraded"] == "no embedding worker is ready"
