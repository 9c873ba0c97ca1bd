"""Embeds the texts of searches and forwards the searches; answers requests for embeddings.

A search is always forwarded: if its text cannot be embedded in time, it becomes a search by words.
It keeps its key and its partition number, so its sender has chosen the worker that answers.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import DeadlineExceeded, EngineFailed, InvalidRequest, RecordError, TriviumError
from schemas.records import Embedded, EmbedRequest, RetrievalRequest
from schemas.retrieval import pack_vector
from schemas.rules.sizes import TEXTS_MAX, check_size
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from workers.embed.batcher import Batcher
from workers.embed.catalog import ChunkingDeclarations
from workers.embed.documents import Totals
from workers.embed.embedders.protocol import Text
from workers.embed.scheduler import Urgency

TOPIC = "embeddings"
WORDS = "words"
URGENCIES = ("prefill", "decode")
_CHARS_PER_TOKEN = 4  # an estimate; to count the tokens of a query costs too much


class QueryWork:
    """Serves searches during one session; call `handle` for each record of `embeddings`."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        batcher: Batcher,
        declarations: ChunkingDeclarations,
        totals: Totals,
        worker_id: str,
    ) -> None:
        self._settings, self._codec, self._producer = settings, codec, producer
        self._batcher, self._declarations = batcher, declarations
        self._totals, self._worker_id = totals, worker_id

    async def handle(self, record: ConsumerRecord) -> None:
        """Process a record; return when the broker has the output. Raises RecordError for an
        invalid record."""
        began_s = time.monotonic()
        request = self._codec.decode(record.value)
        check_record(TOPIC, request)
        assert isinstance(request, RetrievalRequest | EmbedRequest)
        check_size(request, len(record.value or b""))
        count = self._settings.asker_partitions
        if not 0 <= request.reply_partition < count:
            raise RecordError(
                f"{TOPIC}: expected a reply_partition below {count}, found "
                f"{request.reply_partition}"
            )
        collection = request.collection if isinstance(request, RetrievalRequest) else ""
        if not self._declarations.is_ours(collection, request.embedder):
            return  # another pool's
        if isinstance(request, EmbedRequest):
            await self._answer(request)
        else:
            await self._hand_on(record, request, began_s)

    async def _hand_on(
        self, record: ConsumerRecord, request: RetrievalRequest, began_s: float
    ) -> None:
        urgency = request.urgency or URGENCIES[0]
        if urgency not in URGENCIES:
            raise RecordError(
                f"{TOPIC}: expected the urgency {' or '.join(URGENCIES)}, found {urgency[:80]!r}"
            )
        if request.text and not request.vector and request.mode != WORDS:
            vector = await self._vector(request)
            mode = request.mode if vector else WORDS
            by = self._batcher.embedder.name if vector else ""
            request = dataclasses.replace(request, vector=vector, mode=mode, embedder=by)
        request = dataclasses.replace(request, embedded_ms=(time.monotonic() - began_s) * 1000)
        key = (record.key or b"").decode(errors="replace")
        await (
            await self._producer.send(
                f"retrieval.{urgency}", request, key=key, partition=record.partition
            )
        )

    async def _vector(self, request: RetrievalRequest) -> bytes:
        """Return the query's vector, or no bytes if it cannot be computed in time."""
        if request.deadline_ms <= wall_ms():
            return b""
        try:
            self._declarations.check(request.collection)
            async with asyncio.timeout((request.deadline_ms - wall_ms()) / 1000):
                vectors = await self._batcher.embed(
                    [request.text],
                    [_estimate_tokens(request.text)],
                    Urgency.QUERY,
                    request.tenant,
                )
        except (RecordError, EngineFailed, TimeoutError):
            return b""
        self._totals.queries += 1
        return pack_vector(vectors[0])

    async def _answer(self, request: EmbedRequest) -> None:
        try:
            answer = await self._embed(request)
        except TriviumError as error:
            answer = self._reply(request, error=error)
        await (
            await self._producer.send(
                "hits", answer, key=request.embed_id, partition=request.reply_partition
            )
        )

    async def _embed(self, request: EmbedRequest) -> Embedded:
        late_ms = wall_ms() - request.deadline_ms
        if late_ms >= 0:
            raise DeadlineExceeded(f"the deadline passed {late_ms} ms before the texts were read")
        texts: Sequence[Text] = request.token_ids or request.texts
        if not 0 < len(texts) <= TEXTS_MAX:
            raise InvalidRequest(f"expected 1 to {TEXTS_MAX} texts, found {len(texts)}", "input")
        self._check_tokens(request.token_ids)
        try:
            async with asyncio.timeout(-late_ms / 1000):
                vectors = await self._batcher.embed(
                    texts,
                    [_estimate_tokens(text) for text in texts],
                    Urgency.CALL,
                    request.tenant,
                )
        except TimeoutError:
            raise DeadlineExceeded(f"{len(texts)} texts: not embedded in {-late_ms} ms") from None
        self._totals.queries += len(texts)
        tokens = await asyncio.to_thread(self._count_tokens, texts)
        return self._reply(request, vectors=vectors.astype("<f4").tobytes(), tokens=tokens)

    def _check_tokens(self, texts: Sequence[Sequence[int]]) -> None:
        vocab = self._batcher.embedder.vocab
        for number, text in enumerate(texts):
            if not text or min(text) < 0 or max(text) >= vocab:
                id_range = f"{min(text)} to {max(text)}" if text else "none"
                raise InvalidRequest(
                    f"input.{number}: expected token ids of {self._batcher.embedder.name}, from 0 "
                    f"to {vocab - 1}, found {id_range}; those of another model's tokenizer mean "
                    "something else here, so send texts (LangChain: "
                    "check_embedding_ctx_length=False)",
                    "input",
                )

    def _count_tokens(self, texts: Sequence[Text]) -> int:
        embedder = self._batcher.embedder
        tokens = (embedder.token_starts(text) if isinstance(text, str) else text for text in texts)
        return sum(min(embedder.tokens_max, len(token_list)) for token_list in tokens)

    def _reply(
        self,
        request: EmbedRequest,
        *,
        vectors: bytes = b"",
        tokens: int = 0,
        error: TriviumError | None = None,
    ) -> Embedded:
        return Embedded(
            embed_id=request.embed_id,
            worker_id=self._worker_id,
            embedder=self._batcher.embedder.name,
            dim=self._batcher.embedder.dim,
            vectors=vectors,
            tokens=tokens,
            error=error.to_wire() if error else None,
            at_ms=wall_ms(),
        )


def _estimate_tokens(text: Text) -> int:
    return len(text) // _CHARS_PER_TOKEN + 2 if isinstance(text, str) else len(text)
