"""Writes to the fleet topic how many workers each pool wants: for metrics and autoscalers."""

from collections.abc import Sequence

from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable
from schemas.fleet import SCALING_TARGET_MS
from schemas.records import Wanted, WantedPool
from streams.log.clients import LogProducer

KEY = "#wanted"  # beside the keys of members


class Announcer:
    """Writes changed counts at once, others now and then, and none while the broker is away."""

    def __init__(self, producer: LogProducer, written_by: str) -> None:
        self._producer, self._written_by = producer, written_by
        self._last_counts: list[tuple[str, str, int]] = []
        self._last_ms = 0

    async def announce(self, pools: Sequence[WantedPool], now_ms: int) -> None:
        """Write the counts if they changed, or were not written for `SCALING_TARGET_MS`."""
        counts = [(pool.model, pool.role.value, pool.workers) for pool in pools]
        if not pools or (
            counts == self._last_counts and now_ms - self._last_ms < SCALING_TARGET_MS
        ):
            return
        record = Wanted(written_by=self._written_by, at_ms=now_ms, pools=tuple(pools))
        try:
            await self._producer.send("fleet", record, key=KEY, partition=0)
        except (BrokerUnavailable, KafkaError):
            return
        self._last_counts, self._last_ms = counts, now_ms
