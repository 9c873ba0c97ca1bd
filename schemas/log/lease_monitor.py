"""What a member knows of its own lease: whether it stands, is in doubt, or must be given up.

Acknowledgements are late: that is doubt. `schemas/log/membership.py` says what a member does then;
here are only the times, all of this process's monotonic clock. Where the log has copies, a member
that hears nobody waits for longer: the topic's leader changes, and no lease runs meanwhile
(`schemas/fleet.py`).
"""

import asyncio
import time
from collections import deque

from schemas.fleet import DEAF_MS, LEASE_MS, SILENCE_MAX_MS

LEASES_MAX = 2  # so many lengths of a lease without an acknowledgement, and it is given up
_SENT_MAX = 64  # heartbeats whose way back through the log is awaited
_NEVER_S = float("-inf")


class LeaseMonitor:
    """The lease of one life; `copies` are those that the log has of each record."""

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._beat_s = _NEVER_S  # when the last beat that counts was sent
        self._sent_beats: deque[tuple[int, float]] = deque(maxlen=_SENT_MAX)  # seq, when
        self._renewed = asyncio.Event()
        self._heard_s = _NEVER_S  # the last record of anybody
        self._hearing_since_s = _NEVER_S  # the first one after a silence

    def note_sent(self, seq: int) -> None:
        """Note that a heartbeat is being sent."""
        self._sent_beats.append((seq, time.monotonic()))

    def note_acknowledged(self, seq: int) -> None:
        """Count an acknowledged heartbeat, unless the lease is in doubt."""
        if self.is_valid() or self._beat_s == _NEVER_S:
            self.note_read_back(seq)

    def note_read_back(self, seq: int) -> None:
        """Renew the lease: a heartbeat of this life was read from the log."""
        for number, sent_s in self._sent_beats:
            if number == seq:
                self._beat_s = max(self._beat_s, sent_s)
                self._renewed.set()

    def note_record(self) -> None:
        """Note that a record of some member was read."""
        now_s = time.monotonic()
        if _ms(now_s - self._heard_s) > DEAF_MS:
            self._hearing_since_s = now_s
        self._heard_s = now_s

    def is_valid(self) -> bool:
        """Whether the lease still stands beyond doubt; cheap."""
        return _ms(time.monotonic() - self._beat_s) < LEASE_MS

    def waits_for_leader(self) -> bool:
        """Whether the topic may be without a leader, so that nobody's lease runs: it has copies,
        and nobody is heard, or not yet for a lease again."""
        now_s = time.monotonic()
        is_deaf = _ms(now_s - self._heard_s) > DEAF_MS
        is_new = _ms(now_s - self._hearing_since_s) < LEASE_MS
        return self._copies > 1 and (is_deaf or is_new)

    def too_long_ms(self) -> int:
        """For how long no heartbeat was acknowledged at least, if that is too long; else 0."""
        if self._beat_s == _NEVER_S:
            return 0
        most_ms = SILENCE_MAX_MS if self.waits_for_leader() else LEASES_MAX * LEASE_MS
        return most_ms if _ms(time.monotonic() - self._beat_s) > most_ms else 0

    async def wait_until_valid(self) -> None:
        """Wait until the lease stands beyond doubt."""
        while not self.is_valid():
            self._renewed.clear()
            await self._renewed.wait()


def _ms(seconds: float) -> float:
    return seconds * 1000
