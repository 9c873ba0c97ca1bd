"""Ends an incarnation whose consumer has stopped without an error: it lags and reads nothing.

Faust and aiokafka have been seen to stop fetching after a rebalance or a broker restart without
any error; a restart is the cure. Queries the broker with a client of its own. An unreachable broker
is no reason to end, however long that lasts.
"""

import asyncio
from collections.abc import Mapping

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from streams.log.connecting import query_client
from streams.log.faust.group import Group, Place

_LOOKS = 5  # checks within the time after which a consumer counts as stuck


class ReadProgress:
    """Compares what a group's member has read with the ends; time is an argument."""

    def __init__(self, group: Group, stall_ms: int) -> None:
        self._group, self._stall_ms = group, stall_ms
        self._rebalances = self._records_read = -1
        self._first: dict[Place, int] = {}  # ends at the first check of a partition
        self._moved_ms = 0.0

    def check(self, ends: Mapping[Place, int], now_ms: float) -> None:
        """Raise BrokerUnavailable if the member lags and has read nothing for `stall_ms`.

        `ends` are the offsets after the last records. A partition without a record read counts from
        its first check on, also after each rebalance, because other members may have read it.
        """
        group = self._group
        if self._rebalances != group.rebalances:
            self._first.clear()
        first = self._first = {place: self._first.get(place, end) for place, end in ends.items()}
        lag = sum(max(0, end - group.next_offsets.get(p, first[p])) for p, end in ends.items())
        before = self._rebalances, self._records_read
        self._rebalances, self._records_read = group.rebalances, group.records_read
        moved = before != (group.rebalances, group.records_read)
        if not lag or moved or group.is_full:
            self._moved_ms = now_ms
        if now_ms - self._moved_ms > self._stall_ms:
            raise BrokerUnavailable(
                f"{lag} records to read of {sorted(group.owned)} and none read for "
                f"{self._stall_ms} ms; the consumer is stuck, restart it"
            )


async def watch(log: LogSettings, group: Group, stall_ms: int) -> None:
    """Check regularly, until cancelled. Raise BrokerUnavailable if nothing was read for `stall_ms`
    although there are records to read."""
    loop, progress = asyncio.get_running_loop(), ReadProgress(group, stall_ms)
    async with query_client(log) as consumer:
        while True:
            await asyncio.sleep(stall_ms / 1_000 / _LOOKS)
            places = {TopicPartition(log.topic_prefix + t, p): (t, p) for t, p in group.owned}
            try:
                ends = await consumer.end_offsets(list(places)) if places else {}
            except KafkaError:
                ends = {}  # an unreachable broker is no reason to end
            progress.check({places[tp]: end for tp, end in ends.items()}, loop.time() * 1_000)
