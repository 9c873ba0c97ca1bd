"""The journal: which record a router applied, in which order and at which time.

With the records themselves it is all that a replay needs. Lines are gathered here and cut into
batches by `streams/agents/router.py`.
"""

from schemas.records import JournalBatch
from streams.agents.outbox import Write


class Journal:
    """Lines that are not sent yet."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._first_seq = 0
        self._lines: list[tuple[str, int, int, int]] = []

    def add(self, topic: str, partition: int, offset: int, now_ms: int) -> None:
        """One event was applied; ticks and ownership changes name themselves as topic."""
        self._lines.append((topic, partition, offset, now_ms))

    def cut(self, router_epoch: int) -> Write | None:
        """All lines since the last cut, if there are any."""
        if not self._lines:
            return None
        topics, partitions, offsets, times = zip(*self._lines, strict=True)
        batch = JournalBatch(
            router_id=self._router_id,
            router_epoch=router_epoch,
            first_seq=self._first_seq,
            topics=topics,
            partitions=partitions,
            offsets=offsets,
            now_ms=times,
        )
        self._first_seq += len(self._lines)
        self._lines = []
        return Write("journal", self._router_id, 0, batch)
