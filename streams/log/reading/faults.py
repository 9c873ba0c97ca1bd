"""Collects the faults of this process, and counts unreadable records, for its heartbeats.

A member may live and read the fleet topic, and yet fail at its own work: reading a topic fails, or
its work for others fails again and again. The code that does such work reports a failure here
(`note_failing`), and its end (`note_working`). A fault that is not reported again is dropped after
60 s. `trivium status` shows the faults.
"""

import time
from collections import deque

from schemas.errors import clip_message
from schemas.records import Faults

_FORGET_S = 60.0  # longer than any pause between two retries
_SUBJECTS_MAX = 64
_PLACES_MAX = 1_024  # places of unreadable records, so that none is counted twice
_TOLD_CHARS_MAX = 1_000


class ProcessFaults:
    """The faults of one process; cheap while there are none."""

    def __init__(self) -> None:
        self._failing: dict[str, tuple[str, float]] = {}  # reason, and when it was reported
        self._unreadable, self._last = 0, ""
        self._places = deque[tuple[str, int, int]](maxlen=_PLACES_MAX)

    def note_failing(self, subject: str, why: str) -> None:
        """Report that a subject fails, such as the reading of `prompts[1]`."""
        if subject in self._failing or len(self._failing) < _SUBJECTS_MAX:
            self._failing[subject] = clip_message(why), time.monotonic()

    @property
    def has_failing(self) -> bool:
        return bool(self._failing)

    def note_working(self, subject: str) -> None:
        """Report that a subject works again."""
        self._failing.pop(subject, None)

    def note_unreadable(self, topic: str, partition: int, offset: int, why: str) -> None:
        """Count an unreadable record, or an unreadable batch that ends there."""
        place = (topic, partition, offset)
        if place not in self._places:
            self._places.append(place)
            self._unreadable += 1
            self._last = f"{topic}[{partition}]@{offset}: {clip_message(why)}"

    def why_failing(self, subject: str) -> str:
        """Return why a subject fails; empty if no failure is reported."""
        why, said_s = self._failing.get(subject, ("", 0.0))
        return why if time.monotonic() - said_s < _FORGET_S else ""

    @property
    def problem(self) -> str:
        """Return what fails, and why; empty if nothing fails."""
        since_s = time.monotonic() - _FORGET_S
        self._failing = {
            subject: failure for subject, failure in self._failing.items() if failure[1] > since_s
        }
        return "; ".join(f"{subject}: {why}" for subject, (why, _) in self._failing.items())

    def record(self) -> Faults | None:
        """Return the faults for a heartbeat; None if there are none."""
        if not self._failing and not self._unreadable:
            return None
        return Faults(
            failing=self.problem[:_TOLD_CHARS_MAX],
            unreadable_total=self._unreadable,
            unreadable=self._last[:_TOLD_CHARS_MAX],
        )


FAULTS = ProcessFaults()
