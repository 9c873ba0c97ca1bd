"""Watches the fleet topic from outside: which members there are, with their states and loads.

The launcher sees here when processes are ready, and `trivium status` shows it. A watch is not a
member: it neither registers nor writes unreadable records to the dead-letter topic.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Self

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.fleet import LEASE_MS, FleetView
from schemas.records import Heartbeat, Registration, Wanted
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.retry import PAUSE_MAX_S

FORGET_MS = 600_000
SLOW_S = 10.0  # a member that is silent for less may only be slow
_LOOK_S = 0.5  # polled, since a member that falls silent writes nothing to the topic


class FleetWatch:
    """`start` reads the topic up to its end; `follow` continues until cancelled."""

    def __init__(self, settings: LogSettings, codec: Codec | None = None) -> None:
        self.view = FleetView()
        self.changed = asyncio.Event()  # set after each batch; the waiter clears it
        self.last_record_ms = 0  # when the last record was read, in ms
        self._codec = codec or Codec()
        self._reader = AssignedReader(settings, "fleet", [0], client_id="trivium-fleet")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[Self]:
        """Start, and follow the topic in the background until the block ends."""
        async with self:
            following = asyncio.create_task(self.follow())
            try:
                yield self
            finally:
                await cancel_and_wait(following)

    async def start(self) -> None:
        """Apply all records of the topic. May be called again after BrokerUnavailable."""
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
        """Return whether no member has written for a lease, so that the log must be away."""
        return 0 < self.last_record_ms < now_ms - LEASE_MS

    async def follow(self, then: Callable[[FleetView], None] = lambda _: None) -> None:
        """Apply new records, however long the broker is away; call `then` after each batch."""
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
            return  # members that must read it write it to the dead-letter topic
        if isinstance(record, Wanted):
            self.view.scaling_target = record
        elif isinstance(record, Registration | Heartbeat):
            self.view.apply(record, offset, now_ms, logged_ms)
            self.last_record_ms = now_ms


async def wait_for_update(fleet: FleetWatch) -> None:
    """Wait for the next batch, at most `_LOOK_S`; `fleet` must be followed."""
    fleet.changed.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            await fleet.changed.wait()
