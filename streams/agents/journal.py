"""The journal: which record a router applied, in which order and at which time.

With the records themselves it is all that a replay needs. Lines are gathered here and cut into
batches by `streams/agents/router.py`.
"""

from schemas.records import JournalBatch
from schemas.rules.sizes import JOURNAL_LINES_MAX
from streams.agents.outbox import Write

Line = tuple[str, int, int, int]


class Journal:
    """Lines that are not sent yet."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._first_seq = 0
        self._lines: list[Line] = []

    def add(self, topic: str, partition: int, offset: int, now_ms: int) -> None:
        """One event was applied; ticks and ownership changes name themselves as topic."""
        self._lines.append((topic, partition, offset, now_ms))

    def cut(self, router_epoch: int) -> list[Write]:
        """All lines since the last cut, in batches of at most JOURNAL_LINES_MAX."""
        lines, self._lines = self._lines, []
        return [
            self._batch(router_epoch, lines[start : start + JOURNAL_LINES_MAX])
            for start in range(0, len(lines), JOURNAL_LINES_MAX)
        ]

    def _batch(self, router_epoch: int, lines: list[Line]) -> Write:
        topics, partitions, offsets, times = zip(*lines, strict=True)
        batch = JournalBatch(
            router_id=self._router_id,
            router_epoch=router_epoch,
            first_seq=self._first_seq,
            topics=topics,
            partitions=partitions,
            offsets=offsets,
            now_ms=times,
        )
        self._first_seq += len(lines)
        return Write("journal", self._router_id, 0, batch)
