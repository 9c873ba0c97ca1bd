"""Which texts are embedded next: queries before calls, calls before documents. Pure.

Within a class tenants take turns, and of one tenant the first come is the first. After `STREAK_MAX`
batches of one class, one of the next class that waits goes between, so that documents go on however
many queries there are.
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
    tenant: str = ""
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
        # By tenant, who is next first.
        self._lines: dict[Urgency, dict[str, deque[Item]]] = {each: {} for each in Urgency}
        self._streaks = dict.fromkeys(Urgency, 0)

    @property
    def waiting(self) -> int:
        """Texts."""
        return sum(len(line) for lines in self._lines.values() for line in lines.values())

    def add(self, job: Job) -> None:
        """Its texts wait from now on."""
        line = self._lines[job.urgency].setdefault(job.tenant, deque())
        line.extend(Item(job, number) for number in range(len(job.texts)))

    def batch(self) -> list[Item]:
        """The next texts, all of one class: as many as fit, at least one; none where none wait."""
        for lines in self._lines.values():
            for tenant, line in list(lines.items()):
                _skip_dropped(line)
                if not line:
                    del lines[tenant]
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

    def _taken(self, lines: dict[str, deque[Item]]) -> list[Item]:
        """One text of each tenant in turn, as long as they fit."""
        found: list[Item] = []
        tokens = 0
        while lines:
            tenant, line = next(iter(lines.items()))
            tokens += line[0].job.tokens[line[0].number]
            if found and tokens > self._batch_tokens:
                break
            found.append(line.popleft())
            _skip_dropped(line)
            del lines[tenant]
            if line:
                lines[tenant] = line  # behind those of others
        return found


def _skip_dropped(line: deque[Item]) -> None:
    while line and line[0].job.dropped:
        line.popleft()
