"""Watches the fleet topic from outside: who is there, in which state, with what load.

The launcher learns from it when processes are ready, `trivium status` shows it. Takes no part: it
neither registers nor buries records that cannot be read.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Self

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.fleet import LEASE_MS, FleetView
from schemas.log.cancellation import cancel_and_wait
from schemas.log.clients import AssignedReader
from schemas.log.clock import wall_ms
from schemas.log.retry import PAUSE_MAX_S
from schemas.records import Heartbeat, Registration, Wanted
from schemas.settings import LogSettings

FORGET_MS = 600_000
SLOW_S = 10.0  # so long one that is silent may only be slow
_LOOK_S = 0.5  # a member that falls silent changes nothing on the topic


class FleetWatch:
    """`start` reads what is there; `follow` goes on until cancelled."""

    def __init__(self, settings: LogSettings, codec: Codec | None = None) -> None:
        self.view = FleetView()
        self.changed = asyncio.Event()  # set after each batch; whoever waits clears it
        self.last_record_ms = 0  # when the last record came
        self._codec = codec or Codec()
        self._reader = AssignedReader(settings, "fleet", [0], client_id="trivium-fleet")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[Self]:
        """Start, and follow the topic in the background until the end."""
        async with self:
            following = asyncio.create_task(self.follow())
            try:
                yield self
            finally:
                await cancel_and_wait(following)

    async def start(self) -> None:
        """Fold all that the topic holds; may be called again after BrokerUnavailable."""
        await self._reader.start("earliest")
        try:
            records = await self._reader.read_to_end()
        except BaseException:
            await self._reader.stop()
            raise
        for record in records:
            self._fold(
                record.value, record.offset, min(record.timestamp, wall_ms()), record.timestamp
            )

    def is_silent(self, now_ms: int) -> bool:
        """Nobody was heard for a lease, though somebody was before: the log is away."""
        return 0 < self.last_record_ms < now_ms - LEASE_MS

    async def follow(self, then: Callable[[FleetView], None] = lambda _: None) -> None:
        """Fold what comes, however long the broker is away; `then` is called after each batch."""
        while True:
            try:
                records = await self._reader.batch()
            except KafkaError:
                await asyncio.sleep(PAUSE_MAX_S)
                continue
            for record in records:
                self._fold(record.value, record.offset, wall_ms(), record.timestamp)
            self.view.forget(FORGET_MS, wall_ms())
            then(self.view)
            self.changed.set()

    async def stop(self) -> None:
        """Stop reading the fleet topic."""
        await self._reader.stop()

    def _fold(
        self, value: bytes | None, offset: int, now_ms: int, logged_ms: int | None = None
    ) -> None:
        if value is None:
            return
        try:
            record = self._codec.decode(value)
        except RecordError:
            return  # a member that must understand it buries it
        if isinstance(record, Wanted):
            self.view.scaling_target = record
        elif isinstance(record, Registration | Heartbeat):
            self.view.apply(record, offset, now_ms, logged_ms)
            self.last_record_ms = now_ms


async def wait_for_update(fleet: FleetWatch) -> None:
    """Wait for the next batch, or a moment, whichever comes first; `fleet` must be followed."""
    fleet.changed.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            await fleet.changed.wait()
