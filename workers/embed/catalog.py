"""An embedding worker's state from the log: passages of its own partitions, and declarations.

It keeps hashes and an offset of a document's passages, some 300 bytes per document. It reads them
again when a partition is assigned, because other workers may have written to it meanwhile.
Operators' declarations of collections are on partition 0 of `documents`; every worker follows them.
"""

import asyncio
import logging

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import CollectionDeclared, DocumentPassages
from schemas.settings import LogSettings
from schemas.topics import declaration_key
from streams.log.clients import AssignedReader
from streams.log.slices import in_slices
from workers.embed.content import Cutting, PassagesRef, passages_ref
from workers.embed.pools import EmbeddingPool
from workers.embed.settings import EmbeddingSettings

log = logging.getLogger("trivium.embedding")
_LOOK_S = 0.02  # between two looks whether declarations are read
_MARKS_MS = 200  # after which a reader passes the marks of transactions


class PassageCatalog:
    """References to passages by partition and key; `load` a partition before its use."""

    def __init__(self, settings: LogSettings, codec: Codec, client_id: str) -> None:
        self._settings, self._codec = settings, codec
        self._client_id = f"{client_id}-passages"
        self._refs: dict[int, dict[bytes, PassagesRef]] = {}

    def get(self, partition: int, key: bytes) -> PassagesRef | None:
        """Return the reference to a document's passages, None if the log has none."""
        return self._refs[partition].get(key)

    def count(self) -> int:
        """Return the number of documents with known passages."""
        return sum(map(len, self._refs.values()))

    def put(self, partition: int, key: bytes, ref: PassagesRef | None) -> None:
        """Record the passages that this worker has written; None if it has deleted them."""
        refs = self._refs.get(partition)
        if refs is None:
            return
        refs.pop(key, None)
        if ref is not None:
            refs[key] = ref

    async def load(self, partitions: set[int]) -> None:
        """Forget all other partitions, and read the new ones of these to their present end."""
        self._refs = {
            partition: refs for partition, refs in self._refs.items() if partition in partitions
        }
        new = sorted(partitions - self._refs.keys())
        if not new:
            return
        loaded_refs: dict[int, dict[bytes, PassagesRef]] = {partition: {} for partition in new}
        reader = AssignedReader(self._settings, "passages", new, client_id=self._client_id)
        async with reader.reading("earliest"):
            async for batch in reader.until(await reader.end_offsets()):
                async for record in in_slices(batch):
                    self._fold(loaded_refs[record.partition], record)
        self._refs |= loaded_refs
        log.info("partitions %s: %d documents have passages", new, self.count())

    def _fold(self, refs: dict[bytes, PassagesRef], record: ConsumerRecord) -> None:
        key = record.key or b""
        refs.pop(key, None)
        if not record.value:
            return
        try:
            passages = self._codec.decode(record.value)
        except RecordError as error:
            log.warning("passages[%d] %d: %s", record.partition, record.offset, error)
            return
        if isinstance(passages, DocumentPassages):
            refs[key] = passages_ref(passages, record.offset)

    async def read(self, partition: int, key: bytes) -> DocumentPassages | None:
        """Read a document's passages; None if the log no longer has that record."""
        ref = self.get(partition, key)
        if ref is None:
            return None
        reader = AssignedReader(self._settings, "passages", [partition], client_id=self._client_id)
        async with reader.reading({partition: ref.offset}):
            batch = await reader.batch(max_records=1, timeout_ms=self._settings.request_timeout_ms)
        for record in batch:
            if record.offset == ref.offset and record.key == key and record.value:
                passages = self._codec.decode(record.value)
                return passages if isinstance(passages, DocumentPassages) else None
        return None


class ChunkingDeclarations:
    """Follows the declarations of collections; `start` reads them, then `run` until cancelled."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        client_id: str,
        default: Cutting,
        tokens_max: int,
        pool: EmbeddingPool,
    ) -> None:
        """Set up a reader; `tokens_max` bounds the tokens of a passage that the embedder reads."""
        self._codec, self.pool = codec, pool
        self._folding = asyncio.Lock()
        self._default, self._tokens_max = default, tokens_max
        self._declarations: dict[str, CollectionDeclared] = {}
        self._reader = AssignedReader(settings, "documents", [0], client_id=f"{client_id}-declared")

    async def start(self) -> None:
        """Read the declarations that exist; raises BrokerUnavailable."""
        await self._reader.start("earliest")
        async for batch in self._reader.until(await self._reader.end_offsets()):
            await self._fold(batch)

    async def run(self) -> None:
        """Follow new declarations until cancelled; retrieval workers report unreadable ones."""
        wait_ms = 60_000 if self.pool.is_alone else _MARKS_MS
        while True:
            await self._fold(await self._reader.batch(max_records=2_000, timeout_ms=wait_ms))

    async def catch_up(self) -> None:
        """Wait until all declarations are read that the log has now, if there are other pools.

        So no two pools take a document for theirs, and none is left out, of a collection that was
        declared before the document was written.
        """
        if self.pool.is_alone:
            return
        ends = await self._reader.end_offsets()
        while not await self._reader.has_reached(ends):  # noqa: ASYNC110 - `run` reads
            await asyncio.sleep(_LOOK_S)
        async with self._folding:
            return

    def is_ours(self, collection: str, embedder: str = "") -> bool:
        """Return whether this pool handles texts of a collection. `embedder` is what they name
        themselves; otherwise the declaration of the collection counts."""
        declaration = self._declarations.get(collection)
        return self.pool.handles(embedder or (declaration.embedder if declaration else ""))

    def was_declared_after(self, collection: str, at_ms: int) -> bool:
        """Return whether the declaration of a collection is later than that."""
        declaration = self._declarations.get(collection)
        return declaration is not None and declaration.at_ms > at_ms

    async def stop(self) -> None:
        """Close the reader of the declarations."""
        await self._reader.stop()

    def cutting(self, collection: str) -> Cutting:
        """Return how this collection's texts are cut."""
        declaration, default = self._declarations.get(collection), self._default
        tokens, overlap = default.chunk_tokens, default.chunk_overlap
        if declaration is not None:
            tokens = declaration.chunk_tokens if declaration.chunk_tokens > 0 else tokens
            overlap = declaration.chunk_overlap if declaration.chunk_overlap >= 0 else overlap
        tokens = min(tokens, self._tokens_max)
        return Cutting(tokens, min(overlap, tokens // 2), default.embedder, default.tokenizer)

    def check(self, collection: str) -> None:
        """Raise RecordError for a collection that is bound to another embedder."""
        declaration = self._declarations.get(collection)
        if declaration is not None and declaration.embedder not in ("", self._default.embedder):
            raise RecordError(
                f"collection {collection}: it is bound to the embedder {declaration.embedder}, "
                f"found {self._default.embedder} here; embed it with the former, or declare another"
            )

    async def _fold(self, batch: list[ConsumerRecord]) -> None:
        async with self._folding:
            await self._apply(batch)

    async def _apply(self, batch: list[ConsumerRecord]) -> None:
        async for record in in_slices(batch):
            key = (record.key or b"").decode(errors="replace")
            if not key.startswith(declaration_key("")):
                continue
            name = key.removeprefix(declaration_key(""))
            if not record.value:
                self._declarations.pop(name, None)
                continue
            try:
                declaration = self._codec.decode(record.value)
            except RecordError:
                continue
            if isinstance(declaration, CollectionDeclared) and declaration.collection == name:
                self._declarations[name] = declaration


def default_cutting(settings: EmbeddingSettings, embedder: str, tokenizer: str) -> Cutting:
    """Return how collections without a declaration are cut."""
    return Cutting(settings.chunk_tokens, settings.chunk_overlap, embedder, tokenizer)
