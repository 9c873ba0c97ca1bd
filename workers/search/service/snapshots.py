"""A worker's snapshots: one file per collection, with the offsets of both topics that it holds.

A file says where in the log it stands, so files of different moments fit together: the tail is read
from the lowest offsets, and what a collection holds already is passed over. Texts lie beside their
rows; the words of passages are looked up anew. What operators declared, and which documents wait
for their passages, stands in every file. What cannot be used, for whatever reason, is left alone,
and the indexes are rebuilt from the topics.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schemas.errors import SnapshotError
from schemas.log.clock import wall_ms
from schemas.records import CollectionDeclared
from schemas.topics import HOUR_MS
from workers.search.index import snapshot
from workers.search.index.index import Index
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings, ShardPlace
from workers.search.words.shelf import Shelf
from workers.search.words.texts import passages_of

Offsets = dict[str, dict[int, int]]  # by topic and partition
log = logging.getLogger("trivium.retrieval")
# The log keeps the mark of a deleted document for a day; an older snapshot might bring it back.
AGE_MAX_MS = 20 * HOUR_MS


class Snapshots:
    """Files in `folder`/`worker_id`; without a folder, none."""

    def __init__(
        self,
        settings: RetrievalSettings,
        collections: Collections,
        place: ShardPlace,
        worker_id: str,
        offsets: Callable[[], Offsets],
    ) -> None:
        self._settings = settings
        self._collections = collections
        self._place = place
        self._folder = Path(settings.snapshot_folder) / worker_id
        self._offsets = offsets

    def load(self) -> Offsets | None:
        """Fill the collections; where to read on, or None where nothing can be used. Blocks."""
        if not self._settings.snapshot_folder:
            return None
        loaded: dict[str, Index] = {}
        notes_of: dict[str, dict[str, Any]] = {}
        since: dict[str, Offsets] = {}
        try:
            for path in sorted(self._folder.glob("*.index")):
                notes = snapshot.info(path)["notes"]
                self._check(path, notes)
                name = notes["collection"]
                index = loaded[name] = snapshot.load(path)
                notes_of[name], since[name] = notes, _offsets(notes["offsets"])
                log.info("%s: %d rows of %s", path, len(index), name)
            last = max(notes_of.values(), key=lambda each: each["taken_ms"], default=None)
            if last is None:
                return None
            declared = [CollectionDeclared(**each) for each in last["declared"]]
            shelves = {name: shelf_of(index) for name, index in loaded.items()}
            for name, shelf in shelves.items():
                shelf.embedder = str(notes_of[name]["embedder"])
            for name in {*last["waiting"], *loaded}:
                shelf = shelves.setdefault(name, Shelf())
                for document_id in notes_of.get(name, last)["waiting"].get(name, ()):
                    shelf.lives(document_id)
        except (SnapshotError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("no snapshot is used: %s", error)
            return None
        self._collections.indexes.update(loaded)
        self._collections.shelves.update(shelves)
        self._collections.since.update(since)
        for each in declared:
            self._collections.declared.set(each.collection, each)
        return _lowest(list(since.values()))

    def _check(self, path: Path, notes: dict[str, Any]) -> None:
        if notes.get("shard") != str(self._place):
            raise SnapshotError(f"{path} is of shard {notes.get('shard')}, not of {self._place}")
        if wall_ms() - notes["taken_ms"] > AGE_MAX_MS:
            raise SnapshotError(f"{path} is older than {AGE_MAX_MS // HOUR_MS} hours")
        known = self._settings.metric_of(notes["collection"])
        if notes["metric"] != known:
            raise SnapshotError(f"{path} has the metric {notes['metric']}, the settings {known}")

    def save(self) -> None:
        """Write all collections as they are now. Blocks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        shared = {
            "declared": [asdict(each) for each in self._collections.declared.every()],
            "waiting": {
                name: waiting
                for name, shelf in list(self._collections.shelves.items())
                if (waiting := shelf.waiting())
            },
        }
        shelves = self._collections.shelves
        for name, index in list(self._collections.indexes.items()):
            notes = {
                "collection": name,
                "metric": index.metric.value,
                "shard": str(self._place),
                "taken_ms": wall_ms(),
                "embedder": held.embedder if (held := shelves.get(name)) else "",
                "offsets": self._offsets(),  # before the index is looked at: it holds all of these
                **shared,
            }
            file = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
            snapshot.save(index, self._folder / f"{file}.index", notes)

    async def run(self) -> None:
        """Save every interval, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.snapshot_interval_s)
            await self.save_if_wanted()

    async def save_if_wanted(self) -> None:
        """Save; a disk that is full or away costs the snapshot, not the worker."""
        if not self._settings.snapshot_folder:
            return
        try:
            await asyncio.to_thread(self.save)
        except OSError as error:
            log.error("no snapshot was written to %s: %s", self._folder, error)


def _offsets(found: Mapping[str, Any]) -> Offsets:
    return {
        topic: {int(partition): int(at) for partition, at in by_partition.items()}
        for topic, by_partition in found.items()
    }


def _lowest(found: Sequence[Offsets]) -> Offsets:
    """Where to read on, so that no collection lacks anything."""
    return {
        topic: {partition: min(each[topic][partition] for each in found) for partition in places}
        for topic, places in found[0].items()
    }


def shelf_of(index: Index) -> Shelf:
    """What rows tell of the documents that they are passages of. Blocks."""
    shelf, texts = Shelf(), {}
    counts: dict[tuple[str, int], int] = {}  # of passages, by document and offset
    for found in passages_of(index):
        key = found.document_id, found.offset
        counts[key] = counts.get(key, 0) + 1
        texts[found.row_id] = found.text
    for (document_id, offset), count in counts.items():
        shelf.known(document_id, offset, count)
    shelf.words.compact(texts)
    return shelf
