"""Publishes the contents of the engine's prefix cache to routers: batches of changes and snapshots.

It runs as a task of its own, so that sending never delays decode. Records are numbered within an
incarnation. A router that misses one waits for the next snapshot. A snapshot is sent when a router
joins, at a regular interval, and after a batch that could not be sent.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from aiokafka.errors import KafkaError

from schemas import prefix
from schemas.errors import BrokerUnavailable
from schemas.records import KvEvents
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from workers.kv.block_log import BlockLog
from workers.llm.stream import WorkerIdentity

log = logging.getLogger("trivium.worker")

INTERVAL_MS: Final = 200  # between two batches: placement learns soon what a cache has
BLOCKS_MAX: Final = 4_096  # in one record: 32 KiB
SNAPSHOT_INTERVAL_S: Final = 60  # a router that missed a batch waits no longer


class KvEventsPublisher:
    """Publishes the changes in `blocks`; `run` until cancelled."""

    def __init__(
        self,
        blocks: BlockLog,
        producer: LogProducer,
        identity: WorkerIdentity,
        is_valid: Callable[[], bool],
    ) -> None:
        self._blocks = blocks
        self._producer = producer
        self._identity = identity
        self._is_valid = is_valid
        self._seq = 0
        self._snapshot_wanted = True

    def want_snapshot(self) -> None:
        """Send a snapshot next, because a router has joined."""
        self._snapshot_wanted = True

    async def run(self) -> None:
        """Send a batch after every interval in which something changed."""
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            if self._is_valid():  # otherwise the lease may have ended
                if self._snapshot_wanted or loop.time() >= due_s:
                    due_s = loop.time() + SNAPSHOT_INTERVAL_S
                    self._snapshot_wanted = False
                    await self._send(self._snapshot())
                else:
                    await self._send(self._changes())
            await asyncio.sleep(INTERVAL_MS / 1000)

    def _snapshot(self) -> list[KvEvents]:
        self._blocks.take()  # the snapshot includes these changes
        parts = list(self._parts(self._blocks.snapshot())) or [[]]
        last = len(parts) - 1
        return [
            self._events(stored=part, snapshot=n == 0, has_more=n < last)
            for n, part in enumerate(parts)
        ]

    def _changes(self) -> list[KvEvents]:
        removed, stored = self._blocks.take()
        return [
            *(self._events(removed=part) for part in self._parts(removed)),
            *(self._events(stored=part) for part in self._parts(stored)),
        ]

    def _parts(self, hashes: Sequence[int]) -> Iterator[Sequence[int]]:
        return (hashes[start : start + BLOCKS_MAX] for start in range(0, len(hashes), BLOCKS_MAX))

    def _events(
        self,
        *,
        stored: Sequence[int] = (),
        removed: Sequence[int] = (),
        snapshot: bool = False,
        has_more: bool = False,
    ) -> KvEvents:
        self._seq += 1
        return KvEvents(
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            seq=self._seq - 1,
            at_ms=wall_ms(),
            block_size=self._blocks.block_size,
            snapshot=snapshot,
            has_more=has_more,
            stored=prefix.pack(stored),
            removed=prefix.pack(removed),
        )

    async def _send(self, batch: list[KvEvents]) -> None:
        try:
            acks = [
                await self._producer.send("prefixes", record, key=record.worker_id, partition=0)
                for record in batch
            ]
            await asyncio.gather(*acks)
        except (BrokerUnavailable, KafkaError) as error:
            self._snapshot_wanted = True
            log.warning("%s: KV events not sent: %s", self._identity.worker_id, error)
