"""Chooses the next partition of a topic for a request, and tracks which ones are silent.

A direct partition leads to replicas of the shards; through the embedding pool it leads to an
embedding worker and then to these replicas. So each of the two has a `Route` of its own.
"""

from collections.abc import Collection

AVOIDED_MS = 10_000  # the session of the workers' groups
EMBEDDING = -1  # in place of a shard's number: the embedding pool


class PoolRoutes:
    """A route through each embedding pool, by the pool's name; there are as many as pools."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._routes: dict[str, Route] = {}

    def of(self, pool: str) -> "Route":
        """Return the route through a pool of the fleet."""
        if (route := self._routes.get(pool)) is None:
            route = self._routes[pool] = Route(self._partitions)
        return route


class Route:
    """Partitions in turn; a silent one is avoided until its group has reassigned it."""

    def __init__(self, partitions: int) -> None:
        self._count = partitions
        self._last = 0
        self._avoided_ms: dict[int, int] = {}  # end of the time, by partition
        self._heard_ms: dict[tuple[int, int], int] = {}  # last answer, by partition and shard

    def next(self, now_ms: int, near: Collection[int] = ()) -> int:
        """Return the partition whose turn it is; prefer `near` ones that are not avoided."""
        self._last = self._choose(self._last + 1, now_ms, near)
        return self._last

    def farthest(self, partition: int, now_ms: int) -> int:
        """Return the partition farthest away: groups assign ranges, so another worker has it."""
        return self._choose(partition + self._count // 2, now_ms)

    def _choose(self, first: int, now_ms: int, near: Collection[int] = ()) -> int:
        """Return the first partition from `first` on; an avoided one only if all are avoided."""
        turns = [(first + ahead) % self._count for ahead in range(self._count)]
        answering = [
            partition for partition in turns if self._avoided_ms.get(partition, 0) <= now_ms
        ]
        nearest = [partition for partition in answering if partition in near]
        return (nearest or answering or turns)[0]

    def note_answer(self, partition: int, shard: int, now_ms: int) -> None:
        """Note that a shard, or the embedding pool, answered on that partition."""
        self._heard_ms[partition, shard] = now_ms

    def is_silent(self, partition: int, shards: Collection[int], since_ms: float) -> bool:
        """Return whether any of these shards has not answered from a partition since `since_ms`."""
        return any(self._heard_ms.get((partition, shard), 0) < since_ms for shard in shards)

    def avoid(self, partition: int, now_ms: int) -> None:
        """Avoid a partition until its group has given it to another worker."""
        self._avoided_ms[partition] = now_ms + AVOIDED_MS
