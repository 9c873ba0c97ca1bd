"""Snapshots of a shard: one file per collection, each with the offsets of both topics.

A worker writes its own, or the first of a shard's replicas writes them for all. Records that arrive
while a snapshot is written may be in it, and are applied again, which changes nothing. Texts are
stored beside their rows; the word index is rebuilt from them. Every file has the declarations, the
documents that wait for passages, and the names of all collections. A damaged snapshot is renamed,
and the one before it is loaded. A snapshot of other settings is left alone. If none can be used,
the indexes are rebuilt from the topics.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schemas.errors import SnapshotError
from schemas.records import CollectionDeclared
from schemas.topics import HOUR_MS
from streams.log.clock import wall_ms
from workers.retrieval.collections import Collections
from workers.retrieval.passages.passage_store import PassageStore
from workers.retrieval.passages.texts import passages_of
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.snapshot_folder import SnapshotFolder
from workers.vector.graph.build import GraphOf, own_graph
from workers.vector.index import snapshot
from workers.vector.index.index import Index

Offsets = dict[str, dict[int, int]]  # by topic and partition
log = logging.getLogger("trivium.retrieval")
# The log keeps a document's tombstone for a day; an older snapshot might bring the document back.
AGE_MAX_MS = 20 * HOUR_MS
_KEPT_SHARED = 2  # so that a replica can finish reading one while the next is written
_DAMAGED = (SnapshotError, KeyError, TypeError, ValueError, AttributeError)


class Snapshots:
    """Snapshots in `snapshot_folder`, under the worker's or the shard's name; no folder, none."""

    def __init__(
        self,
        settings: RetrievalSettings,
        collections: Collections,
        place: ShardPlace,
        offsets: Callable[[], Offsets],
        *,
        worker_id: str,
        shard_name: str,
        is_first: Callable[[], bool],
        graph_of: GraphOf = own_graph,
    ) -> None:
        self._settings = settings
        self._collections = collections
        self._place = place
        self._offsets = offsets
        self._is_first = is_first
        self._graph_of = graph_of
        self._is_shared = settings.shares_snapshots
        path = Path(settings.snapshot_folder) / (shard_name if self._is_shared else worker_id)
        self._folder = SnapshotFolder(path, worker_id, _KEPT_SHARED if self._is_shared else 1)

    def load(self) -> Offsets | None:
        """Load the newest usable snapshot; return its offsets, or None without one. Blocks."""
        if not self._settings.snapshot_folder:
            return None
        self._folder.remove_own_partials()
        tried: set[Path] = set()
        while len(tried) <= _KEPT_SHARED:  # another replica may write new ones meanwhile
            if (
                path := next((p for p in self._folder.list_snapshots() if p not in tried), None)
            ) is None:
                break
            tried.add(path)
            try:
                return self._loaded(path)
            except (snapshot.Unfit, OSError) as error:
                log.warning("a snapshot is not used: %s", error)
            except _DAMAGED as error:
                self._folder.quarantine(path, error)
        if tried:
            log.warning("no snapshot is used: documents are read from the log")
        return None

    def _loaded(self, path: Path) -> Offsets:
        names, loaded = set[str](), dict[str, Index]()
        notes: dict[str, Any] = {}
        embedders: dict[str, str] = {}
        for file in sorted(path.glob("*.index")):
            header = snapshot.info(file)
            notes = header["notes"]
            self._check(file, header["storage"], notes)
            name = notes["collection"]
            names.add(name)
            if self._collections.is_from_file(name):
                continue
            index = loaded[name] = snapshot.load(
                file, threads=self._settings.lanes, mapped=not self._is_shared,
                graph_of=self._graph_of,
            )  # fmt: skip
            embedders[name] = str(notes["embedder"])
            log.info("%s: %d rows of %s", file, len(index), name)
        if not names:
            raise FileNotFoundError(f"{path} has no files; another worker removes it")
        if missing := set(notes["collections"]) - names:
            raise SnapshotError(f"{path} lacks collections: {', '.join(sorted(missing)):.200}")
        offsets = _offsets(notes["offsets"])
        declared = [CollectionDeclared(**record) for record in notes["declared"]]
        stores = {name: store_of(index) for name, index in loaded.items()}
        for name, embedder in embedders.items():
            stores[name].embedder = embedder
        for name, waiting in notes["waiting"].items():
            store = stores.setdefault(name, PassageStore())
            for document_id in waiting:
                store.add_document(document_id)
        self._collections.indexes.update(loaded)
        self._collections.stores.update(stores)
        self._collections.snapshot_offsets.update(dict.fromkeys(loaded, offsets))
        for declaration in declared:
            self._collections.declared.set(declaration.collection, declaration)
        return offsets

    def _check(self, path: Path, storage: str, notes: dict[str, Any]) -> None:
        if notes.get("shard") != str(self._place):
            raise snapshot.Unfit(f"{path} is of shard {notes.get('shard')}, not of {self._place}")
        if wall_ms() - notes["taken_ms"] > AGE_MAX_MS:
            raise snapshot.Unfit(f"{path} is older than {AGE_MAX_MS // HOUR_MS} hours")
        setting = self._settings.metric_of(notes["collection"])
        if notes["metric"] != setting:
            raise snapshot.Unfit(f"{path} has the metric {notes['metric']}, the settings {setting}")
        setting = self._settings.storage_of(notes["collection"])
        if storage != setting:
            raise snapshot.Unfit(f"{path} has vectors of {storage}, the settings {setting}")

    def save(self) -> None:
        """Write all collections as they are now; raises OSError. Blocks."""
        offsets = self._offsets()  # read first, so that the indexes have all records before them
        indexes, stores = self._collections.of_documents(), dict(self._collections.stores)
        if not indexes:
            return
        shared = {
            "collections": list(indexes),
            "shard": str(self._place),
            "taken_ms": wall_ms(),
            "offsets": offsets,
            "declared": [asdict(record) for record in self._collections.declared.list_all()],
            "waiting": {
                name: waiting for name, store in stores.items() if (waiting := store.waiting())
            },
        }
        with self._folder.writing() as folder:
            for name, index in indexes.items():
                notes = {
                    "collection": name,
                    "metric": index.metric.value,
                    "embedder": store.embedder if (store := stores.get(name)) else "",
                    **shared,
                }
                file = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
                snapshot.save(index, folder / f"{file}.index", notes)

    async def run(self) -> None:
        """Save every `snapshot_interval_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.snapshot_interval_s)
            await self.save_if_wanted()

    async def save_if_wanted(self) -> None:
        """Save if this worker writes snapshots; an OSError is logged, not raised."""
        if not self._settings.snapshot_folder or (self._is_shared and not self._is_first()):
            return
        try:
            await asyncio.to_thread(self.save)
        except OSError as error:
            log.error("no snapshot was written to %s: %s", self._folder.path, error)


def _offsets(by_topic: Mapping[str, Any]) -> Offsets:
    return {
        topic: {int(partition): int(at) for partition, at in by_partition.items()}
        for topic, by_partition in by_topic.items()
    }


def store_of(index: Index) -> PassageStore:
    """Rebuild a collection's passage store from the rows of its index. Blocks."""
    store, texts = PassageStore(), {}
    counts: dict[tuple[str, int], int] = {}  # of passages, by document and offset
    for passage in passages_of(index):
        key = passage.document_id, passage.offset
        counts[key] = counts.get(key, 0) + 1
        texts[passage.row_id] = passage.text
    for (document_id, offset), count in counts.items():
        store.restore(document_id, offset, count)
    store.words.compact(texts)
    return store
