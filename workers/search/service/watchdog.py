"""Ends a worker whose consumer has died quietly: retrievals come, and none is read for long.

Faust and aiokafka have been seen to stop fetching after a rebalance or a broker restart without
any error; a restart is the cure. Asks the broker by a client of its own.
"""

import asyncio
from collections.abc import Callable, Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable
from schemas.log.connecting import client_options, started
from schemas.settings import LogSettings
from workers.search.service.receipts import Partition

STALL_MS = 30_000
_LOOK_S = 5.0


class Progress:
    """What was read against what there is; time is an argument."""

    def __init__(self) -> None:
        self._first: dict[Partition, int] = {}  # ends at the first look at a partition
        self._read: dict[Partition, int] = {}
        self._moved_ms = 0.0

    def look(
        self, ends: Mapping[Partition, int], read: Mapping[Partition, int], now_ms: float
    ) -> None:
        """`read` is the offset after the last record taken. Raises BrokerUnavailable."""
        self._first = {place: self._first.get(place, end) for place, end in ends.items()}
        lag = sum(max(0, end - read.get(p, self._first[p])) for p, end in ends.items())
        if not lag or self._read != read:
            self._read, self._moved_ms = dict(read), now_ms
        if now_ms - self._moved_ms > STALL_MS:
            raise BrokerUnavailable(
                f"{lag} retrievals to read and none read for {STALL_MS} ms; the consumer is stuck, "
                "restart it"
            )


async def watch(
    log_settings: LogSettings, owned: Callable[[], set[Partition]], read: Mapping[Partition, int]
) -> None:
    """Look now and then, until cancelled; a broker that is away is no reason to end.

    `owned` returns another object after each rebalance, and `read` is empty then: what others have
    read meanwhile is not known here, so the counting begins anew.
    """
    loop, progress, held = asyncio.get_running_loop(), Progress(), owned()
    consumer = AIOKafkaConsumer(**client_options(log_settings))
    try:
        await started(consumer.start, consumer.stop)
        while True:
            await asyncio.sleep(_LOOK_S)
            if held is not (now := owned()):
                held, progress = now, Progress()
            places = {TopicPartition(log_settings.topic_prefix + t, p): (t, p) for t, p in held}
            try:
                ends = await consumer.end_offsets(list(places)) if places else {}
            except KafkaError:
                continue
            now_ms = loop.time() * 1000
            progress.look({places[tp]: end for tp, end in ends.items()}, read, now_ms)
    finally:
        await consumer.stop()
