"""A retrieval that a client waits for: its shards, and their answers so far."""

import asyncio
from dataclasses import dataclass, field

from schemas.errors import DeadlineExceeded
from schemas.records import Hits
from schemas.retrieval import ShardLayout


@dataclass(slots=True, eq=False)
class PendingRetrieval:
    """A retrieval that waits for the answers of its shards."""

    layout: ShardLayout
    answers: dict[int, Hits] = field(default_factory=dict)
    refused: dict[int, Hits] = field(default_factory=dict)  # refusals before it was sent again
    was_resent: bool = False
    done_event: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, hits: Hits) -> None:
        former_hits = self.answers.get(hits.shard)
        if former_hits is None or former_hits.error is not None:
            self.answers[hits.shard] = hits
        if self.answers.keys() >= self.layout.living or self.wants_another():
            self.done_event.set()

    def wants_another(self) -> bool:
        """Return whether another shard replica may answer where one has failed."""
        return not self.was_resent and any(map(_is_the_replicas, self.answers.values()))

    def resend(self) -> None:
        """Drop the answers of replicas that refused, to ask others; keep the other answers."""
        self.was_resent = True
        self.refused = {s: hits for s, hits in self.answers.items() if _is_the_replicas(hits)}
        for shard in self.refused:
            del self.answers[shard]
        self.done_event.clear()

    def change_layout(self, layout: ShardLayout) -> None:
        """Start again with another number of shards, for which the answers so far are useless."""
        self.layout = layout
        self.answers.clear()
        self.resend()


def _is_the_replicas(hits: Hits) -> bool:
    late = DeadlineExceeded.code
    return hits.error is not None and hits.error.retriable and hits.error.code != late
