"""Which texts are embedded next: queries before calls, calls before documents. Pure.

Within a class the first come is the first. After `STREAK_MAX` batches of one class, one of the
next class that waits goes between, so that documents go on however many queries there are.
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
    CALL = 1  # somebody who wants vectors
    DOCUMENT = 2


@dataclass(slots=True, eq=False)
class Job:
    """Texts that one asker waits for; `tokens` has a number for each."""

    texts: Sequence[Text]
    tokens: Sequence[int]
    urgency: Urgency
    dropped: bool = False  # nobody waits any more


@dataclass(frozen=True, slots=True)
class Item:
    """One text of a job."""

    job: Job
    number: int

    @property
    def text(self) -> Text:
        return self.job.texts[self.number]


class Scheduler:
    """Texts that wait, and batches of them with at most so many tokens."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._lines: dict[Urgency, deque[Item]] = {urgency: deque() for urgency in Urgency}
        self._streaks = dict.fromkeys(Urgency, 0)

    @property
    def waiting(self) -> int:
        """Texts."""
        return sum(map(len, self._lines.values()))

    def add(self, job: Job) -> None:
        """Its texts wait from now on."""
        self._lines[job.urgency].extend(Item(job, number) for number in range(len(job.texts)))

    def batch(self) -> list[Item]:
        """The next texts, all of one class: as many as fit, at least one; none where none wait."""
        for line in self._lines.values():
            while line and line[0].job.dropped:
                line.popleft()
        waiting = [urgency for urgency in Urgency if self._lines[urgency]]
        if not waiting:
            return []
        chosen = next(
            (each for each in waiting if self._streaks[each] < STREAK_MAX or each is waiting[-1]),
        )
        for urgency in Urgency:
            if urgency <= chosen:
                self._streaks[urgency] = 0 if urgency < chosen else self._streaks[urgency] + 1
        return self._taken(self._lines[chosen])

    def _taken(self, line: deque[Item]) -> list[Item]:
        found: list[Item] = []
        tokens = 0
        while line:
            job, number = line[0].job, line[0].number
            if not job.dropped:
                tokens += job.tokens[number]
                if found and tokens > self._batch_tokens:
                    break
                found.append(line[0])
            line.popleft()
        return found
