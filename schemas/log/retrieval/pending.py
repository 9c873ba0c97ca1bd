"""A retrieval that an asker waits for: whom it was asked of, and what they answered."""

import asyncio
from dataclasses import dataclass, field

from schemas.errors import DeadlineExceeded
from schemas.records import Hits
from schemas.retrieval import Layout


@dataclass(slots=True, eq=False)
class Pending:
    """A retrieval under way."""

    layout: Layout
    answers: dict[int, Hits] = field(default_factory=dict)
    refused: dict[int, Hits] = field(default_factory=dict)  # before it was sent again
    is_again: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, hits: Hits) -> None:
        known = self.answers.get(hits.shard)
        if known is None or known.error is not None:
            self.answers[hits.shard] = hits
        if self.answers.keys() >= self.layout.living or self.wants_another():
            self.done.set()

    def wants_another(self) -> bool:
        """Whether another replica may do what one could not."""
        return not self.is_again and any(map(_is_the_replicas, self.answers.values()))

    def begin_again(self) -> None:
        """What replicas refused is asked of others; what they found stays."""
        self.is_again = True
        self.refused = {s: hits for s, hits in self.answers.items() if _is_the_replicas(hits)}
        for shard in self.refused:
            del self.answers[shard]
        self.done.clear()

    def move(self, layout: Layout) -> None:
        """Begin again with other shards; what was answered so far is of no use to them."""
        self.layout = layout
        self.answers.clear()
        self.begin_again()


def _is_the_replicas(hits: Hits) -> bool:
    late = DeadlineExceeded.code
    return hits.error is not None and hits.error.retriable and hits.error.code != late
