"""A worker's snapshots: one file per collection, with the offsets of `documents` that it holds.

A file says where in the log it stands, so files of different moments fit together: the tail is read
from the lowest offsets, and a change that is applied twice changes nothing. What cannot be used,
for whatever reason, is left alone, and the indexes are rebuilt from the topic.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.errors import SnapshotError
from schemas.log.clock import wall_ms
from schemas.topics import HOUR_MS
from workers.search.index import snapshot
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings, ShardPlace

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
        offsets: Callable[[], dict[int, int]],
    ) -> None:
        self._settings = settings
        self._collections = collections
        self._place = place
        self._folder = Path(settings.snapshot_folder) / worker_id
        self._offsets = offsets

    def load(self) -> dict[int, int] | None:
        """Fill the collections; where to read on, or None where nothing can be used. Blocks."""
        if not self._settings.snapshot_folder:
            return None
        loaded, offsets = {}, None
        try:
            for path in sorted(self._folder.glob("*.index")):
                notes = snapshot.info(path)["notes"]
                self._check(path, notes)
                index = loaded[notes["collection"]] = snapshot.load(path)
                found = {int(partition): at for partition, at in notes["offsets"].items()}
                offsets = {p: min(at, (offsets or found)[p]) for p, at in found.items()}
                log.info("%s: %d documents of %s", path, len(index), notes["collection"])
        except (SnapshotError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("no snapshot is used: %s", error)
            return None
        self._collections.indexes.update(loaded)
        return offsets

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
        for name, index in list(self._collections.indexes.items()):
            notes = {
                "collection": name,
                "metric": index.metric.value,
                "shard": str(self._place),
                "taken_ms": wall_ms(),
                "offsets": self._offsets(),  # before the index is looked at: it holds all of these
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
