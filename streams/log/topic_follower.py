"""Follows a topic of which a process keeps a copy, and lets readers wait until the copy is current.

Several processes have such a copy, and each lags by the records that it has not read yet. A reader
that needs records which another process has just written waits in `catch_up` until the copy has all
records that were in the log at the call: a read index, as in section 6.4 of Ongaro's dissertation
on Raft (2014).
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from aiokafka import ConsumerRecord

from schemas.errors import BrokerUnavailable
from streams.log.clients import MARKS_MAX_MS, MARKS_MS, AssignedReader


class TopicFollower:
    """The progress of a copy. A process may lose its reader, and follow with another one."""

    def __init__(self, topic: str, *, wait_ms: int) -> None:
        self.news = asyncio.Condition()  # notified when the copy has more records
        self._topic, self._wait_s = topic, wait_ms / 1000
        self._reader: AssignedReader | None = None
        self._is_applying = False  # the last batch is not in the copy yet
        self._asks = asyncio.Lock()
        self._ends: asyncio.Task[dict[int, int]] | None = None  # the next request for ends

    async def follow(
        self, reader: AssignedReader, *, max_records: int = 500
    ) -> AsyncGenerator[list[ConsumerRecord]]:
        """Yield batches without end; the caller puts each into the copy before it takes the next.

        The copy has all records before the reader's position. Close this before the reader.
        """
        self._reader = reader
        try:
            while True:
                async with self.news:
                    self._is_applying = False
                    self.news.notify_all()
                records = await reader.batch(max_records=max_records)
                self._is_applying = True
                yield records
        finally:
            self._reader = None

    async def catch_up(self) -> None:
        """Wait until the copy has all records that were decided in the log at the call.

        Raises BrokerUnavailable if that takes longer than `wait_ms`.
        """
        async with self._in_time():
            await self._reach(await self._ends_now())

    async def reach(self, offsets: Mapping[int, int]) -> None:
        """Wait until the copy has all records before these offsets; raises as `catch_up`."""
        async with self._in_time():
            await self._reach(offsets)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_s):
                yield
        except TimeoutError as error:
            raise BrokerUnavailable(
                f"{self._topic}: not read in {self._wait_s:g} s; try again"
            ) from error

    async def _ends_now(self) -> dict[int, int]:
        """Return the ends as of this call or later; callers that wait at the same time share one
        request."""
        if self._ends is None:
            self._ends = asyncio.create_task(self._ask_ends())
            self._ends.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._ends)

    async def _ask_ends(self) -> dict[int, int]:
        async with self._asks:
            reader = await self._wait_for_reader()
            self._ends = None  # later callers need later ends
            return await reader.end_offsets()

    async def _wait_for_reader(self) -> AssignedReader:
        async with self.news:
            await self.news.wait_for(lambda: self._reader is not None)
        assert self._reader is not None
        return self._reader

    async def _reach(self, offsets: Mapping[int, int]) -> None:
        look_ms = MARKS_MS
        while not await (await self._wait_for_reader()).has_reached(offsets) or self._is_applying:
            try:
                async with asyncio.timeout(look_ms / 1000), self.news:
                    await self.news.wait()
            except TimeoutError:
                look_ms = min(2 * look_ms, MARKS_MAX_MS)
