"""A gateway in this process without a broker; its log is one that the test reads and writes."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai

from schemas.codec import Codec
from schemas.errors import NotFound, NotReady, TriviumError
from schemas.fleet import Member
from schemas.model.parser_rules import NONE
from schemas.model.parsers import ParserNames
from schemas.records import (
    AnswerDelta,
    Cancellation,
    Document,
    MemberKind,
    Passage,
    Quoted,
    Registration,
    Request,
    Resumption,
    StoredResponse,
    TokenFrame,
    WireError,
)
from schemas.retrieval import unpack_vector
from schemas.rules.sizes import check_size
from streams.calls.config import GatewaySettings
from streams.calls.ids import ConversationTurn
from streams.calls.in_flight import CallsInFlight
from streams.calls.log.sender import ToRouter
from streams.calls.metrics import Metrics
from streams.calls.request.served import ModelCard, ServedModel, ServedModels
from streams.calls.request.tokenizer import Tokenizer
from streams.calls.stream.hub import Hub
from streams.gateway.app import create_app
from streams.gateway.http.listener import listen
from streams.gateway.http.server import make_server
from streams.gateway.state import Gateway
from streams.log.clients import Headers
from streams.log.retrieval.embedding import EmbeddedTexts, Texts
from streams.log.retrieval.results import Hit, RetrievalResult
from streams.openai.responses.response_id import RecordPosition
from tests.streams.gateway.memory_objects import MemoryObjects
from tests.streams.gateway.samples import MODEL, frame, parsed_frame, stream_end
from tests.streams.gateway.small_tokenizer import tokenizer as small_tokenizer
from tests.waits import PATIENCE_S, until

STARTED_MS = 1_700_000_000_000
EVENT_KEY = "of-all-gateways-in-these-tests-01"
CODEC = Codec()


class KeptResponses:
    """Topic `responses` of a test; gateways may share one."""

    def __init__(self) -> None:
        self.records: list[StoredResponse] = []
        self.deleted: set[str] = set()

    async def put(self, record: StoredResponse) -> RecordPosition:
        self.records.append(CODEC.decode(CODEC.encode(record)))
        return RecordPosition(1, len(self.records) - 1)

    async def get(self, request_id: str, place: RecordPosition) -> StoredResponse:
        record = self.records[place.offset]
        if request_id in self.deleted or record.request_id != request_id:
            raise NotFound("deleted")
        return record

    async def delete(self, record: StoredResponse) -> None:
        self.deleted.add(record.request_id)


class FakeLog:
    """The log of a test. Every frame that is pushed also stays on its partition."""

    trouble: TriviumError | None = None  # raised instead of accepting anything

    def __init__(self, hub: Hub, partition: int = 3) -> None:
        self.hub = hub
        self.partition = partition
        self.responses = KeptResponses()
        self.frames: list[TokenFrame] = []
        self.sent_records: list[ToRouter] = []
        self.headers: list[Headers] = []
        self.published_turns: list[ConversationTurn] = []
        self.reasons: list[str] = []
        self.away_models: set[str] = set()  # models and adapters without a ready worker
        self.members: list[Member] = []
        self.hold_acks: asyncio.Event | None = None
        self.news = asyncio.Condition()
        self.on_request: Callable[[Request], None] | None = None
        self.on_cancellation: Callable[[Cancellation], None] | None = None

    def reply_position(self, model: str = "", adapter: str = "") -> tuple[int, int]:
        if self.trouble is not None:
            raise self.trouble
        if (adapter or model) in self.away_models:
            raise NotReady(f"no worker serves the model {adapter or model!r}")
        return self.partition, len(self.frames)

    async def send(self, record: ToRouter, headers: Headers = ()) -> None:
        check_size(record, len(CODEC.encode(record)))
        if self.hold_acks is not None:
            await self.hold_acks.wait()
        if self.trouble is not None:
            raise self.trouble
        async with self.news:
            self.sent_records.append(record)
            self.headers.append(headers)
            self.news.notify_all()
        if isinstance(record, Request) and self.on_request is not None:
            self.on_request(record)
        if isinstance(record, Cancellation) and self.on_cancellation is not None:
            self.on_cancellation(record)

    def living(self, kind: MemberKind) -> list[Member]:
        return [member for member in self.members if member.registration.kind is kind]

    def servers(self, model: str) -> list[Registration]:
        return [member.registration for member in self.members]

    def publish_turn(self, turn: ConversationTurn) -> None:
        self.published_turns.append(turn)

    def problems(self) -> list[str]:
        return self.reasons

    def unserved(self) -> list[str]:
        return [f"model {model!r}: none" for model in sorted(self.away_models)]

    async def read_again(
        self, partition: int, offset: int, *, live: bool = True
    ) -> AsyncGenerator[TokenFrame]:
        end = len(self.frames)
        for at in itertools.count(offset):
            if at >= end and not live:
                return
            async with self.news:
                while len(self.frames) <= at:
                    await self.news.wait()
            yield self.frames[at]

    async def push(self, *frames: TokenFrame) -> None:
        """Frames arrive, together."""
        async with self.news:
            self.frames += frames
            self.news.notify_all()
        for token_frame in frames:
            self.hub.apply(token_frame, asyncio.get_running_loop().time())

    async def wait_sent(self, count: int) -> None:
        """Until this many records were sent."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.sent_records) >= count)

    @property
    def requests(self) -> list[Request]:
        return [record for record in self.sent_records if isinstance(record, Request)]

    @property
    def cancellations(self) -> list[Cancellation]:
        return [record for record in self.sent_records if isinstance(record, Cancellation)]

    @property
    def resumptions(self) -> list[Resumption]:
        return [record for record in self.sent_records if isinstance(record, Resumption)]


class LetterPool:
    """A retrieval pool that embeds texts as how often they have each of some letters, and holds
    documents with such vectors.
    """

    LETTERS = "abcdefgh"
    trouble: TriviumError | None = None

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        self.contents: dict[str, str] = {}  # of documents that answers cite
        self.checked: list[tuple[str, str]] = []  # collection and tenant
        self.delay: asyncio.Event | None = None  # searches wait for it
        self.searches: list[dict[str, Any]] = []  # of vector stores
        self.embedded: list[tuple[int, str]] = []  # deadlines and tenants of calls for vectors
        self.search_results: list[
            RetrievalResult
        ] = []  # by the next ones of these; then nothing is

    async def search_text(self, text: str, *, deadline_ms: int, **fields: Any) -> RetrievalResult:
        if self.delay is not None:
            await self.delay.wait()
        if self.trouble is not None:
            raise self.trouble
        if fields["collection"] != "answers":
            self.searches.append({"text": text, **fields})
            return self.search_results.pop(0) if self.search_results else found_hits()
        vector = (await self.embed([text], deadline_ms=deadline_ms)).vectors[0]
        criteria = json.loads(fields["filter"])
        hits = []
        for document in self.documents.values():
            metadata = json.loads(document.metadata)
            score = float(unpack_vector(document.vector) @ vector)
            if document.collection != fields["collection"] or document.tenant not in (
                "",
                fields["tenant"],
            ):
                continue
            if (
                metadata["key"] != criteria["key"]
                or metadata["until_ms"] <= criteria["until_ms"]["$gt"]
            ):
                continue
            if score >= fields["min_score"]:
                passage = Passage(
                    passage_id=document.document_id,
                    document_id=document.document_id,
                    text=document.text,
                    score=score,
                )
                hits.append(Hit(document.document_id, 1 - score, score=score, passage=passage))
        hits.sort(key=lambda hit: -hit.score)
        return found_hits(*hits[: fields["k"]])

    async def check(
        self, quoted: Sequence[Quoted], *, deadline_ms: int, **fields: Any
    ) -> frozenset[str]:
        if self.trouble is not None:
            raise self.trouble
        self.checked.append((fields["collection"], fields["tenant"]))
        names = (q.document_id for q in quoted if self.contents.get(q.document_id) != q.content)
        return frozenset(names)

    async def write(self, document: Document) -> None:
        self.documents[document.document_id] = document

    async def remove(self, collection: str, document_id: str) -> None:
        self.documents.pop(document_id, None)

    async def embed(
        self, texts: Texts, *, deadline_ms: int, tenant: str = "", embedder: str = ""
    ) -> EmbeddedTexts:
        self.embedded.append((deadline_ms, tenant))
        if self.trouble is not None:
            raise self.trouble
        words = [t if isinstance(t, str) else "".join(map(chr, t)) for t in texts]
        counts = np.array([[word.count(c) for c in self.LETTERS] for word in words], np.float32)
        lengths = np.linalg.norm(counts, axis=1, keepdims=True)
        vectors = counts / np.maximum(lengths, 1e-9)
        return EmbeddedTexts(vectors=vectors, embedder="letters@1", tokens=sum(map(len, texts)))


def set_parsers(calls: CallsInFlight, parsers: ParserNames) -> None:
    """Give the model of some calls these parsers."""
    served = calls.models.default
    card = replace(served.card, parsers=parsers)
    calls.models = ServedModels(replace(served, card=card))


def found_hits(*hits: Hit, missing: Mapping[int, WireError] | None = None) -> RetrievalResult:
    """What a search has found."""
    return RetrievalResult(
        retrieval_id="r",
        hits=hits,
        shards=1,
        missing=missing or {},
        exact=True,
        seeds=(),
        extends=0,
        distances_computed=0,
        took_ms=1.0,
    )


class InProcessGateway:
    """One gateway in this process."""

    def __init__(
        self,
        *,
        max_model_len: int = 512,
        partition: int = 3,
        parsers: ParserNames | None = None,
        tokenizer: Tokenizer | None = None,
        other_cards: Sequence[ModelCard] = (),
        **settings: Any,
    ) -> None:
        metrics = Metrics()
        hub = Hub(metrics)
        self.log = FakeLog(hub, partition)
        self.pool = LetterPool()
        self.objects = MemoryObjects()
        card = ModelCard(
            name=MODEL,
            model=MODEL,
            max_model_len=max_model_len,
            created_s=1_700_000_000,
            parsers=parsers or ParserNames(tool=NONE, reasoning=NONE),
        )
        models = ServedModels(ServedModel(card, tokenizer or small_tokenizer()), other_cards)
        settings = {"event_key": EVENT_KEY, **settings}
        calls = CallsInFlight(
            *(GatewaySettings(**settings), models, hub, metrics),
            fleet=self.log,
            log=self.log,
            process_id="gateway-1",
            started_ms=STARTED_MS,
        )
        self.state = Gateway(
            *(calls, metrics),
            tokens=self.log,
            responses=self.log.responses,
            objects=self.objects,
            pool=self.pool,
            publish_turn=self.log.publish_turn,
        )
        self.app = create_app(self.state)

    def client(self) -> httpx.AsyncClient:
        """Calls the app without a socket; responses arrive whole."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def answer_with(self, *texts: str, **end: Any) -> None:
        """Answer every request at once, one token per text."""

        def answer(request: Request) -> None:
            self.log.hub.apply(
                frame(
                    request.request_id,
                    list(texts),
                    end=stream_end(request.request_id, texts, **end),
                ),
                asyncio.get_running_loop().time(),
            )

        self.log.on_request = answer

    def answer_with_deltas(self, *deltas: AnswerDelta, **end: Any) -> None:
        """Answer every request at once, with one token that is parsed to these deltas."""

        def answer(request: Request) -> None:
            parsed = parsed_frame(request.request_id, *deltas, **end)
            self.log.hub.apply(parsed, asyncio.get_running_loop().time())

        self.log.on_request = answer


def http_client(url: str) -> httpx.AsyncClient:
    """A client that waits long, and keeps no connection that the server may be about to close."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)


@contextlib.asynccontextmanager
async def serving(gateway: InProcessGateway) -> AsyncIterator[str]:
    """The app on a real socket; gives its URL, once it listens."""
    sock = listen("127.0.0.1", 0)
    server = make_server(gateway.app, gateway.state.settings)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    try:
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        sock.close()


async def call(
    gateway: InProcessGateway, body: Any, path: str = "/v1/chat/completions", **headers: str
) -> Any:
    """Status and JSON of a call."""
    async with gateway.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post(
            path,
            content=content,
            headers={
                "content-type": "application/json",
                **{k.replace("_", "-"): v for k, v in headers.items()},
            },
        )
        return response.status_code, response.json()


@contextlib.asynccontextmanager
async def stock_clients(*gateways: InProcessGateway) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """A stock client of each gateway, served over HTTP."""
    async with contextlib.AsyncExitStack() as stack:
        ai_clients = []
        for gateway in gateways:
            url = await stack.enter_async_context(serving(gateway))
            client = openai.AsyncOpenAI(
                base_url=url + "/v1", api_key="key", timeout=PATIENCE_S, max_retries=0
            )
            ai_clients.append(await stack.enter_async_context(client))
        yield ai_clients
