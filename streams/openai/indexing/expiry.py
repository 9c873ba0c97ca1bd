"""Deletes expired and deleted files and stores, and uploads that were not completed."""

import asyncio

from schemas.records import CollectionDeclared
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.documents import declare
from streams.log.slices import in_slices
from streams.openai.objects.log import ObjectLog
from streams.openai.objects.stores import DELETED
from streams.openai.objects.table import STORED, UPLOADING, key_of, mark_deleted

LOOK_S = 2.0
UPLOAD_MS = 900_000  # an upload that takes longer was interrupted


class ExpirySweeper:
    """Sweeps objects at most every `LOOK_S` seconds."""

    def __init__(self, log: LogSettings, objects: ObjectLog) -> None:
        self._log, self._objects = log, objects
        self._last_sweep_s = float("-inf")

    async def sweep(self) -> None:
        """Delete what has expired or was deleted; raises BrokerUnavailable."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_sweep_s < LOOK_S:
            return
        self._last_sweep_s = now_s
        table, now_ms = self._objects.table, wall_ms()
        async for file in in_slices(table.every_file()):
            if file.state == STORED and 0 < file.expires_ms <= now_ms:
                await self._objects.put(*table.deletion_of(file))
            elif (file.state == DELETED and not table.batches.needs(file)) or (
                file.state == UPLOADING and now_ms - file.created_ms > UPLOAD_MS
            ):
                await self._objects.drop_parts(file)
                await self._objects.drop(key_of(file))
        async for store in in_slices(list(table.every_store())):
            expires_ms = table.expires_ms(store)
            if expires_ms is not None and expires_ms <= now_ms:
                files = table.contents(store)
                entries = [files.entry(file_id) for file_id in list(files.files)]
                await self._objects.put(
                    *(mark_deleted(entry) for entry in entries if entry is not None)
                )
        for store in list(table.deleted_stores()):
            await self.declare(store.store_id, None)
            await self._objects.drop(*table.keys_of(store))

    async def declare(self, collection: str, declaration: CollectionDeclared | None) -> None:
        """Declare a collection on the log; None withdraws it."""
        await declare(self._objects.require_producer(), self._log, collection, declaration)
