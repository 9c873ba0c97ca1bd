"""A topic that a process follows to keep a copy of what it says, and questions to that copy.

Several processes have such a copy, and each is behind by what it has not read yet. Who asks one of
them about what another has just written waits in `catch_up` until the copy has all that was in the
log when the question came: a read index, as in section 6.4 of Ongaro's dissertation on Raft (2014).
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from aiokafka import ConsumerRecord

from schemas.errors import BrokerUnavailable
from schemas.log.clients import MARKS_MAX_MS, MARKS_MS, AssignedReader


class TopicFollower:
    """How far a copy has come. A process may lose its reader, and follow by another."""

    def __init__(self, topic: str, *, wait_ms: int) -> None:
        self.news = asyncio.Condition()  # the copy has more
        self._topic, self._wait_s = topic, wait_ms / 1000
        self._reader: AssignedReader | None = None
        self._is_applying = False  # what was read is not in the copy yet
        self._asks = asyncio.Lock()
        self._ends: asyncio.Task[dict[int, int]] | None = None  # the question that is to be asked

    async def follow(
        self, reader: AssignedReader, *, max_records: int = 500
    ) -> AsyncGenerator[list[ConsumerRecord]]:
        """What comes, without end; who takes the next records has put the last ones in the copy.

        The copy has all that lies before the reader's place. To be closed before the reader is.
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
        """Return when the copy has all that was decided in the log when this was called.

        Raises BrokerUnavailable where that cannot be known in time.
        """
        async with self._in_time():
            await self._reach(await self._ends_now())

    async def reach(self, offsets: Mapping[int, int]) -> None:
        """Return when the copy has all before these offsets; raises as `catch_up`."""
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
        """The ends as of this call or later: who comes while others wait for their turn to ask
        shares their question."""
        if self._ends is None:
            self._ends = asyncio.create_task(self._ask_ends())
            self._ends.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._ends)

    async def _ask_ends(self) -> dict[int, int]:
        async with self._asks:
            reader = await self._wait_for_reader()
            self._ends = None  # who comes from here on wants later ones
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
