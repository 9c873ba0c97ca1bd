"""Counts outcomes, waits and durations of retrievals since the worker's start, by class."""

from collections import Counter
from collections.abc import Mapping

from schemas.errors import DeadlineExceeded
from schemas.records import Hits, SearchTally
from schemas.retrieval import WORDS
from schemas.rules.buckets import SEARCH_MS, Buckets
from workers.vector.index.kinds import SearchKind

COMPLETED = "completed"


class KindTally:
    """Outcomes, waits and durations of retrievals of one class."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._waits, self._times = Buckets(SEARCH_MS), Buckets(SEARCH_MS)

    def add(self, hits: Hits, took_ms: float) -> None:
        """Count an answered retrieval; searches by words and errors have no wait for a slot."""
        self.outcomes[COMPLETED if hits.error is None else hits.error.code] += 1
        self._times.add(took_ms)
        if hits.error is None and hits.mode != WORDS:
            self._waits.add(hits.wait_ms)

    def to_record(self, kind: SearchKind) -> SearchTally:
        """Make the record of this class for a heartbeat."""
        return SearchTally(
            kind=kind.value,
            outcomes=dict(self.outcomes),
            waits=tuple(self._waits.counts),
            waited_ms=self._waits.sum,
            times=tuple(self._times.counts),
            took_ms=self._times.sum,
        )


class RetrievalTallies:
    """Tallies of all classes that retrievals ask for."""

    def __init__(self) -> None:
        self.by_kind: Mapping[SearchKind, KindTally] = {
            SearchKind.PREFILL: KindTally(),
            SearchKind.DECODE: KindTally(),
        }

    @property
    def searches(self) -> int:
        """Count all retrievals that were answered."""
        return sum(tally.outcomes.total() for tally in self.by_kind.values())

    @property
    def misses(self) -> int:
        """Count the retrievals whose deadline had passed."""
        return sum(tally.outcomes[DeadlineExceeded.code] for tally in self.by_kind.values())

    def to_records(self) -> tuple[SearchTally, ...]:
        """Make the records of all classes for a heartbeat."""
        return tuple(tally.to_record(kind) for kind, tally in self.by_kind.items())
