"""Fetches that wait long at a broker that has nothing, so that who reads little asks little.

A broker answers as soon as there is a record, however long a fetch may wait, but it answers the
requests of a connection in their order. So fetches have a connection of their own: no question
waits for one. A fetch that nobody waits for any more, because the partitions have changed, is left
with its connection. And a fetch waits long only where nothing else can come up meanwhile: there is
one broker, so no partition moves to it from another, and the fetch asks for every partition and for
the same as the last one did.

aiokafka sends at most one fetch at a time to a broker, and has no setting for any of this.
"""

from collections.abc import Hashable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.protocol.fetch import FetchRequest

LONGEST_MS = 2_000
LOOK_MS = 1_000  # in which aiokafka looks by itself for what to fetch; whatever is new wakes it
_FETCHES = "fetches"  # a group of connections beside aiokafka's own
_Question = frozenset[tuple[str, int, int]]


class Fetches:
    """How long each fetch of a consumer waits, by its broker."""

    def __init__(self, shortest_ms: int, longest_ms: int) -> None:
        self._shortest_ms, self._longest_ms = shortest_ms, max(shortest_ms, longest_ms)
        self._asked: dict[Hashable, tuple[_Question, int]] = {}

    def wait_ms(self, node: Hashable, question: _Question, wanted: int) -> int:
        """Of a fetch of these partitions and offsets, of as many as are wanted of that broker."""
        before, waited_ms = self._asked.get(node, (None, 0))
        idle = question == before and len(question) == wanted
        wait_ms = min(2 * waited_ms, self._longest_ms) if idle else self._shortest_ms
        self._asked[node] = question, wait_ms
        return wait_ms


def fetch_apart(consumer: AIOKafkaConsumer, shortest_ms: int, longest_ms: int) -> None:
    """Have a consumer that is not started yet fetch so."""
    client, fetches = consumer._client, Fetches(shortest_ms, longest_ms)  # noqa: SLF001  # see above
    send = client.send

    async def send_apart(node_id: Any, request: Any, **options: Any) -> Any:
        if not isinstance(request, FetchRequest):
            return await send(node_id, request, **options)
        connection = client._conns.get((node_id, _FETCHES))  # noqa: SLF001
        if connection is not None and connection._requests:  # noqa: SLF001  # one that was given up
            connection.close()
        leader = client.cluster.leader_for_partition
        wanted = sum(leader(each) == node_id for each in consumer.assignment())
        is_alone = len(client.cluster.brokers()) == 1
        request._max_wait_ms = (  # noqa: SLF001
            fetches.wait_ms(node_id, _question(request), wanted) if is_alone else shortest_ms
        )
        return await send(node_id, request, group=_FETCHES)

    client.send = send_apart


def _question(request: FetchRequest) -> _Question:
    return frozenset(
        (topic, partition, offset)
        for topic, partitions in request.topics
        for partition, offset, _ in partitions
    )
