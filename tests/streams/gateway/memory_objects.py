"""What callers keep, in the memory of a test instead of on a log."""

from collections.abc import AsyncIterator

from schemas.records import StoredFile
from streams.openai.objects.table import ObjectRecord, ObjectTable, key_of


class MemoryObjects:
    """`Objects` without a log."""

    def __init__(self) -> None:
        self.table = ObjectTable()
        self.parts: list[bytes] = []
        self.trouble: Exception | None = None  # raised instead of keeping anything

    async def catch_up(self) -> None:
        """There is nothing else to read."""

    def partition(self, file_id: str) -> int:
        return 0

    async def put(self, *records: ObjectRecord) -> None:
        if self.trouble is not None:
            raise self.trouble
        for record in records:
            self.table.apply(key_of(record), record)

    async def drop(self, *keys: str) -> None:
        if self.trouble is not None:
            raise self.trouble
        for key in keys:
            self.table.apply(key, None)

    async def write_parts(self, file: StoredFile, parts: AsyncIterator[bytes]) -> list[int]:
        offsets = []
        async for part in parts:
            offsets.append(len(self.parts))
            self.parts.append(part)
        return offsets

    async def read_parts(self, file: StoredFile) -> AsyncIterator[bytes]:
        for offset in file.parts:
            yield self.parts[offset]
