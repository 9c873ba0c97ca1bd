"""Watches the fleet topic from outside: who is there, in which state, with what load.

The launcher learns from it when processes are ready, `trivium status` shows it. Takes no part: it
neither registers nor buries records that cannot be read.
"""

import asyncio
from collections.abc import Callable

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.fleet import FleetView
from schemas.log.clients import AssignedReader
from schemas.log.clock import wall_ms
from schemas.records import Heartbeat, Registration
from schemas.settings import LogSettings

FORGET_MS = 600_000


class FleetWatch:
    """`start` reads what is there; `follow` goes on until cancelled."""

    def __init__(self, settings: LogSettings, codec: Codec | None = None) -> None:
        self.view = FleetView()
        self.changed = asyncio.Event()  # set after each batch; whoever waits clears it
        self.heard_ms = 0  # when the last record came
        self._codec = codec or Codec()
        self._reader = AssignedReader(settings, "fleet", [0], client_id="trivium-fleet")

    async def start(self) -> None:
        """Fold everything that the topic holds."""
        await self._reader.start("earliest")
        for record in await self._reader.read_to_end():
            self._fold(record.value, record.offset, min(record.timestamp, wall_ms()))

    async def follow(self, then: Callable[[FleetView], None] = lambda _: None) -> None:
        """Fold what comes; `then` is called after each batch."""
        while True:
            for record in await self._reader.batch():
                self._fold(record.value, record.offset, wall_ms())
            self.view.forget(FORGET_MS, wall_ms())
            then(self.view)
            self.changed.set()

    async def stop(self) -> None:
        """Close."""
        await self._reader.stop()

    def _fold(self, value: bytes | None, offset: int, now_ms: int) -> None:
        if value is None:
            return
        try:
            record = self._codec.decode(value)
        except RecordError:
            return  # a member that must understand it buries it
        if isinstance(record, Registration | Heartbeat):
            self.view.apply(record, offset, now_ms)
            self.heard_ms = now_ms
