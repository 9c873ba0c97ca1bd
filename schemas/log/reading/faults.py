"""What this process cannot do at the moment, and what it could not read of the log: told in its
heartbeats, for `trivium status`.

A member may live, and hear the fleet, and yet do nothing of what it is there for: a topic gives it
nothing to read, or the work that it does for others fails again and again. Whoever does such work
says so here (`note_failing`), and takes it back (`note_working`). One that is heard of no more is
forgotten.
"""

import time
from collections import deque

from schemas.errors import clip_message
from schemas.records import Faults

_FORGET_S = 60.0  # longer than any pause between two tries
_SUBJECTS_MAX = 64
_PLACES_MAX = 1_024  # of records that could not be read, to count none twice
_TOLD_CHARS_MAX = 1_000


class ProcessFaults:
    """Those of one process; cheap where there are none."""

    def __init__(self) -> None:
        self._failing: dict[str, tuple[str, float]] = {}  # why, and when that was said
        self._unreadable, self._last = 0, ""
        self._places = deque[tuple[str, int, int]](maxlen=_PLACES_MAX)

    def note_failing(self, subject: str, why: str) -> None:
        """Note that a subject fails, such as the reading of `prompts[1]`."""
        if subject in self._failing or len(self._failing) < _SUBJECTS_MAX:
            self._failing[subject] = clip_message(why), time.monotonic()

    @property
    def has_failing(self) -> bool:
        return bool(self._failing)

    def note_working(self, subject: str) -> None:
        """Note that a subject works again."""
        self._failing.pop(subject, None)

    def note_unreadable(self, topic: str, partition: int, offset: int, why: str) -> None:
        """Count a record, or a batch that ends there, that cannot be read."""
        place = (topic, partition, offset)
        if place not in self._places:
            self._places.append(place)
            self._unreadable += 1
            self._last = f"{topic}[{partition}]@{offset}: {clip_message(why)}"

    def why_failing(self, subject: str) -> str:
        """Why it does not work; empty where nothing is known of that."""
        why, said_s = self._failing.get(subject, ("", 0.0))
        return why if time.monotonic() - said_s < _FORGET_S else ""

    @property
    def problem(self) -> str:
        """What fails, and why; empty where all works."""
        since_s = time.monotonic() - _FORGET_S
        self._failing = {
            subject: failure for subject, failure in self._failing.items() if failure[1] > since_s
        }
        return "; ".join(f"{subject}: {why}" for subject, (why, _) in self._failing.items())

    def record(self) -> Faults | None:
        """For a heartbeat; None where there is nothing to tell."""
        if not self._failing and not self._unreadable:
            return None
        return Faults(
            failing=self.problem[:_TOLD_CHARS_MAX],
            unreadable_total=self._unreadable,
            unreadable=self._last[:_TOLD_CHARS_MAX],
        )


FAULTS = ProcessFaults()
