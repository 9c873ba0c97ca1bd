"""Chooses the texts that are embedded next: queries, then calls, then documents. Pure.

Within a class, tenants take turns, and each tenant's texts are first in, first out. After
`STREAK_MAX` batches of one class, the next waiting class gets one batch, so that documents make
progress under any number of queries.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from workers.embed.embedders.protocol import Text

STREAK_MAX = 4


class Urgency(IntEnum):
    """Who waits for a text, the most urgent first."""

    QUERY = 0  # a retrieval
    CALL = 1  # a request for embeddings
    DOCUMENT = 2


@dataclass(slots=True, eq=False)
class EmbedJob:
    """Texts that one caller waits for; `tokens` has the token count of each."""

    texts: Sequence[Text]
    tokens: Sequence[int]
    urgency: Urgency
    tenant: str = ""
    dropped: bool = False  # the caller no longer waits


@dataclass(frozen=True, slots=True)
class EmbedItem:
    """One text of a job."""

    job: EmbedJob
    number: int

    @property
    def text(self) -> Text:
        return self.job.texts[self.number]


class EmbedScheduler:
    """Queues of texts, from which it takes batches of at most `batch_tokens` tokens."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        # By tenant; the tenant whose turn is next comes first.
        self._lines: dict[Urgency, dict[str, deque[EmbedItem]]] = {
            urgency: {} for urgency in Urgency
        }
        self._streaks = dict.fromkeys(Urgency, 0)

    @property
    def waiting(self) -> int:
        """Return the number of texts that wait."""
        return sum(len(line) for lines in self._lines.values() for line in lines.values())

    def add(self, job: EmbedJob) -> None:
        """Queue the texts of a job."""
        line = self._lines[job.urgency].setdefault(job.tenant, deque())
        line.extend(EmbedItem(job, number) for number in range(len(job.texts)))

    def batch(self) -> list[EmbedItem]:
        """Take the next batch, of one class: at least one text, or none if no text waits."""
        for lines in self._lines.values():
            for tenant, line in list(lines.items()):
                _skip_dropped(line)
                if not line:
                    del lines[tenant]
        waiting = [urgency for urgency in Urgency if self._lines[urgency]]
        if not waiting:
            return []
        chosen = next(
            (
                candidate
                for candidate in waiting
                if self._streaks[candidate] < STREAK_MAX or candidate is waiting[-1]
            ),
        )
        for urgency in Urgency:
            if urgency <= chosen:
                self._streaks[urgency] = 0 if urgency < chosen else self._streaks[urgency] + 1
        return self._take_batch(self._lines[chosen])

    def _take_batch(self, lines: dict[str, deque[EmbedItem]]) -> list[EmbedItem]:
        """Take a text of each tenant in turn until the batch is full."""
        items: list[EmbedItem] = []
        tokens = 0
        while lines:
            tenant, line = next(iter(lines.items()))
            tokens += line[0].job.tokens[line[0].number]
            if items and tokens > self._batch_tokens:
                break
            items.append(line.popleft())
            _skip_dropped(line)
            del lines[tenant]
            if line:
                lines[tenant] = line  # behind the other tenants
        return items


def _skip_dropped(line: deque[EmbedItem]) -> None:
    while line and line[0].job.dropped:
        line.popleft()
