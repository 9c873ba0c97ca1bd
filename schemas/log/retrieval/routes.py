"""Which partition of a topic is asked next, and which ones are silent.

Asked directly, a partition is a shard's replica; through the embedding pool it is an embedding
worker and then that replica. So the two are told apart, each with a `Route` of its own.
"""

from collections.abc import Collection

AVOIDED_MS = 10_000  # the session of the workers' groups
EMBEDDING = -1  # who answered, where it is no shard


class Route:
    """Partitions take turns; one that is silent is avoided until the group has noticed."""

    def __init__(self, partitions: int) -> None:
        self._count = partitions
        self._last = 0
        self._avoided_ms: dict[int, int] = {}  # until when
        self._heard_ms: dict[tuple[int, int], int] = {}  # when last, by partition and shard

    def next(self, now_ms: int, near: Collection[int] = ()) -> int:
        """The partition whose turn it is, one of the `near` ones where these are not avoided."""
        self._last = self._choose(self._last + 1, now_ms, near)
        return self._last

    def farthest(self, partition: int, now_ms: int) -> int:
        """Groups assign ranges, so that is another worker's if there is one."""
        return self._choose(partition + self._count // 2, now_ms)

    def _choose(self, first: int, now_ms: int, near: Collection[int] = ()) -> int:
        """The first partition from there on; those avoided only where all are."""
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
        """Whether one of these has answered nothing from a partition since then."""
        return any(self._heard_ms.get((partition, shard), 0) < since_ms for shard in shards)

    def avoid(self, partition: int, now_ms: int) -> None:
        """Until its group has given it to somebody else."""
        self._avoided_ms[partition] = now_ms + AVOIDED_MS
