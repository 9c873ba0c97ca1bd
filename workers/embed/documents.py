"""Makes passages of documents: one record per document, in the order of its changes.

Several documents are in flight at once. Changes of one document are handled one after the other,
so `passages` has them in the same order. A worker that has lost a partition writes nothing more to
it: its tasks are cancelled, and `give_up` waits for writes in flight.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import EngineFailed, RecordError
from schemas.records import Document, DocumentPassages, MemberKind
from schemas.retrieval import Vector
from schemas.settings import LogSettings
from schemas.topics import check_record, collection_of, document_key
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import Headers, LogProducer
from streams.log.clock import wall_ms
from streams.log.documents import KEPT
from streams.log.membership import Membership
from workers.embed.batcher import Batcher
from workers.embed.catalog import ChunkingDeclarations, PassageCatalog
from workers.embed.chunking import Span, cut, split_long_tokens, tokens_of
from workers.embed.content import (
    Cutting,
    DocumentAction,
    Tokens,
    check_spans,
    check_text,
    choose_action,
    content_hash,
    passages_of,
    passages_ref,
)
from workers.embed.scheduler import Urgency

Result = TypeVar("Result")
EmbeddedSpans = tuple[list[Span], Vector]  # a vector for each passage
_IDLE_CHARS_MAX = 4 << 20  # characters of texts being embedded without a waiting caller
_WRITE_TIMEOUT_S = 10.0  # longest wait for the last writes to a lost partition


@dataclass(slots=True)
class Totals:
    """Counts of an embedding worker since its process started."""

    queries: int = 0  # texts of retrievals and calls
    chunks: int = 0
    documents: int = 0
    unchanged: int = 0  # documents whose passages existed already


@dataclass(slots=True)
class _Text:
    """A text's embedding task, shared by all callers with the same text."""

    task: "asyncio.Task[EmbeddedSpans]"
    chars: int
    askers: int = 0


class Unfinished:
    """Texts that are being embedded, by `content_hash`. Their tasks outlive a session, so that
    the next session does not embed them again."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    async def result(
        self, content: str, chars: int, embed: Callable[[], Coroutine[None, None, EmbeddedSpans]]
    ) -> EmbeddedSpans:
        """Return the result of the text's running task, or start `embed`; raises what it raises."""
        text = self._texts.pop(content, None) or _Text(asyncio.create_task(embed()), chars)
        self._texts[content] = text
        text.askers += 1
        try:
            return await asyncio.shield(text.task)
        finally:
            text.askers -= 1
            if text.task.done() and not text.askers:
                self._texts.pop(content, None)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        idle_texts = {content: text for content, text in self._texts.items() if not text.askers}
        chars = sum(text.chars for text in idle_texts.values())
        for content, text in idle_texts.items():
            if chars <= _IDLE_CHARS_MAX:
                return
            text.task.cancel()
            del self._texts[content]
            chars -= text.chars

    async def close(self) -> None:
        """Cancel all embedding tasks and wait for them."""
        await cancel_and_wait(*(text.task for text in self._texts.values()))


class DocumentWork:
    """Makes passages during one session; call `handle` for each record of `documents`."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        batcher: Batcher,
        catalog: PassageCatalog,
        declarations: ChunkingDeclarations,
        tokens: Tokens | None,
        totals: Totals,
        membership: Membership,
        unfinished: Unfinished,
    ) -> None:
        self._settings, self._codec, self._producer = settings, codec, producer
        self._batcher, self._catalog, self._declarations = batcher, catalog, declarations
        self._tokens, self._totals, self._membership = tokens, totals, membership
        self._unfinished = unfinished
        self._loading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: dict[bytes, asyncio.Future[None]] = {}  # newest change in flight, by document
        self._writes: set[asyncio.Future[None]] = set()

    def load(self, partitions: set[int]) -> asyncio.Future[None]:
        """Load the existing passages of this worker's partitions, which replace the former ones.
        Documents wait for the result; it fails if the passages cannot be read."""
        self._loading.cancel()
        self._loading = asyncio.ensure_future(self._catalog.load(partitions))
        return self._loading

    async def give_up(self) -> None:
        """Give up all partitions and wait for writes in flight; call it after the tasks of
        `handle` are cancelled, before other workers get the partitions."""
        self._loading.cancel()
        self._loading = asyncio.get_running_loop().create_future()
        if self._writes:
            await asyncio.wait(self._writes, timeout=_WRITE_TIMEOUT_S)

    async def handle(self, record: ConsumerRecord) -> None:
        """Process a record; return when the broker has its passages. Raises RecordError or
        EngineFailed for a document that cannot have any."""
        key = record.key or b""
        if key.startswith(b"/"):
            return  # a record about a collection
        previous_change = self._last.get(key)
        change = self._last[key] = asyncio.get_running_loop().create_future()
        try:
            if previous_change is not None:
                await asyncio.wait([previous_change])
            await asyncio.shield(self._loading)
            await self._follow(record, key)
        finally:
            change.set_result(None)
            if self._last.get(key) is change:
                del self._last[key]

    async def _follow(self, record: ConsumerRecord, key: bytes) -> None:
        try:
            document = self._decode(record, key)
        except RecordError:
            if self._declarations.pool.name or self._others_bury():
                return
            raise
        collection = collection_of(key.decode(errors="replace"))
        await self._declarations.catch_up()
        if not self._declarations.is_ours(collection):
            return self._leave(record, collection)
        cutting = self._declarations.cutting(collection if document else "")
        ref = self._catalog.get(record.partition, key)
        action = choose_action(document, cutting, ref)
        self._totals.documents += document is not None and bool(document.text)
        if action is DocumentAction.DROP:
            await self._write(record, key, None)
        if document is None or action is DocumentAction.DROP:
            return
        if action is DocumentAction.NOTHING:
            self._totals.unchanged += bool(document.text)
            return
        check_text(document)
        self._declarations.check(document.collection)
        if action is DocumentAction.KEEP and (
            passages := await self._refresh_facts(record, key, document)
        ):
            await self._write(record, key, passages, [KEPT])
        else:
            await self._write(record, key, await self._make_passages(record, document, cutting))

    def _leave(self, record: ConsumerRecord, collection: str) -> None:
        """Leave a document to another pool. Raises RecordError for one of the first pool that was
        written before its collection was declared: the other pool may have left it to this one."""
        if not self._declarations.pool.name and record.value:
            if self._declarations.was_declared_after(collection, record.timestamp):
                self._declarations.check(collection)

    def _decode(self, record: ConsumerRecord, key: bytes) -> Document | None:
        if not record.value:
            return None
        document = self._codec.decode(record.value)
        check_record("documents", document)
        if not isinstance(document, Document):
            raise RecordError(f"documents: expected a document, found {document!r:.200}")
        expected_key = document_key(document.collection, document.document_id).encode()
        if key != expected_key:
            raise RecordError(
                f"documents: expected the key {expected_key!r:.200}, found {key!r:.200}"
            )
        return document

    def _others_bury(self) -> bool:
        """Return whether retrieval workers are alive: one of them sends unreadable records to the
        dead-letter topic."""
        living = self._membership.view.living(MemberKind.WORKER, wall_ms())
        return any(member.registration.search is not None for member in living)

    async def _refresh_facts(
        self, record: ConsumerRecord, key: bytes, document: Document
    ) -> DocumentPassages | None:
        """Return the existing passages with the document's new facts, None if they are gone."""
        old = await self._catalog.read(record.partition, key)
        if old is None:
            return None
        self._totals.unchanged += 1
        return dataclasses.replace(
            old,
            tenant=document.tenant,
            metadata=document.metadata,
            documents_offset=record.offset,
            document_ms=document.at_ms,
            at_ms=wall_ms(),
        )

    async def _make_passages(
        self, record: ConsumerRecord, document: Document, cutting: Cutting
    ) -> DocumentPassages:
        content = content_hash(document.text, cutting)
        spans, vectors = await self._unfinished.result(
            content, len(document.text), lambda: self._embed_document(document, cutting)
        )
        self._totals.chunks += len(spans)
        return await _in_thread(
            lambda: passages_of(
                document,
                cutting,
                spans,
                vectors,
                self._tokens,
                documents_offset=record.offset,
                now_ms=wall_ms(),
            )
        )

    async def _embed_document(self, document: Document, cutting: Cutting) -> EmbeddedSpans:
        spans, tokens = await _in_thread(lambda: self._cut(document, cutting))
        check_spans(document, spans)
        texts = [document.text[span.start : span.end] for span in spans]
        urgency, tenant = Urgency.DOCUMENT, document.tenant
        return spans, await self._batcher.embed(texts, tokens, urgency, tenant)

    def _cut(self, document: Document, cutting: Cutting) -> tuple[list[Span], list[int]]:
        starts = split_long_tokens(
            document.text, self._batcher.embedder.token_starts(document.text)
        )
        spans = cut(
            document.text, starts, tokens_max=cutting.chunk_tokens, overlap=cutting.chunk_overlap
        )
        return spans, [tokens_of(starts, span) for span in spans]

    async def _write(
        self,
        record: ConsumerRecord,
        key: bytes,
        passages: DocumentPassages | None,
        headers: Headers = (),
    ) -> None:
        await self._membership.wait_until_valid()
        writing = asyncio.ensure_future(
            self._send_passages(record.partition, key, passages, headers)
        )
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        await asyncio.shield(writing)

    async def _send_passages(
        self, partition: int, key: bytes, passages: DocumentPassages | None, headers: Headers
    ) -> None:
        if passages is None:
            topic = self._settings.topic_prefix + "passages"
            await (await self._producer.send_raw(topic, None, key=key, partition=partition))
            self._catalog.put(partition, key, None)
            return
        ack = await self._producer.send(
            "passages", passages, key=key.decode(), partition=partition, headers=headers
        )
        acknowledged = await ack
        self._catalog.put(partition, key, passages_ref(passages, int(acknowledged.offset)))


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Run work on a thread; raises its RecordErrors, and EngineFailed for a library's errors."""
    try:
        return await asyncio.to_thread(work)
    except RecordError:
        raise
    except Exception as error:
        raise EngineFailed(f"the text cannot be cut: {type(error).__name__}: {error}") from error
