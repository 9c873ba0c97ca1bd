"""Monitors a member's own lease: whether it is valid, in doubt, or must be given up.

A lease is in doubt while acknowledgements are late. `streams/log/membership.py` decides what a
member does then; this module has only the times, all by the process's monotonic clock. If the log
is replicated, a member that reads no fleet records waits longer: the topic's leader changes, and no
lease runs out meanwhile (`schemas/fleet.py`).
"""

import asyncio
import time
from collections import deque

from schemas.fleet import DEAF_MS, LEASE_MS, SILENCE_MAX_MS

LEASES_MAX = 2  # lengths of a lease without an acknowledgement after which it is given up
_SENT_MAX = 64  # heartbeats that were sent and not yet read back from the log
_NEVER_S = float("-inf")


class LeaseMonitor:
    """The lease of one incarnation; `copies` is the log's replication factor."""

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._beat_s = _NEVER_S  # when the last acknowledged heartbeat was sent
        self._sent_beats: deque[tuple[int, float]] = deque(maxlen=_SENT_MAX)  # seq, when
        self._renewed = asyncio.Event()
        self._heard_s = _NEVER_S  # when the last record of any member was read
        self._hearing_since_s = _NEVER_S  # the first record after a silence

    def note_sent(self, seq: int) -> None:
        """Note that a heartbeat is being sent."""
        self._sent_beats.append((seq, time.monotonic()))

    def note_acknowledged(self, seq: int) -> None:
        """Count an acknowledged heartbeat, unless the lease is in doubt."""
        if self.is_valid() or self._beat_s == _NEVER_S:
            self.note_read_back(seq)

    def note_read_back(self, seq: int) -> None:
        """Renew the lease, because a heartbeat of this incarnation was read from the log."""
        for number, sent_s in self._sent_beats:
            if number == seq:
                self._beat_s = max(self._beat_s, sent_s)
                self._renewed.set()

    def note_record(self) -> None:
        """Note that a record of any member was read."""
        now_s = time.monotonic()
        if _ms(now_s - self._heard_s) > DEAF_MS:
            self._hearing_since_s = now_s
        self._heard_s = now_s

    def is_valid(self) -> bool:
        """Return whether the lease is valid beyond doubt; cheap."""
        return _ms(time.monotonic() - self._beat_s) < LEASE_MS

    def waits_for_leader(self) -> bool:
        """Return whether the topic may be without a leader, so that no leases run out: it is
        replicated, and records have not been read again for a whole lease."""
        now_s = time.monotonic()
        is_deaf = _ms(now_s - self._heard_s) > DEAF_MS
        is_new = _ms(now_s - self._hearing_since_s) < LEASE_MS
        return self._copies > 1 and (is_deaf or is_new)

    def too_long_ms(self) -> int:
        """Return the exceeded limit, in ms, of time without an acknowledged heartbeat; else 0."""
        if self._beat_s == _NEVER_S:
            return 0
        most_ms = SILENCE_MAX_MS if self.waits_for_leader() else LEASES_MAX * LEASE_MS
        return most_ms if _ms(time.monotonic() - self._beat_s) > most_ms else 0

    async def wait_until_valid(self) -> None:
        """Wait until the lease is valid beyond doubt."""
        while not self.is_valid():
            self._renewed.clear()
            await self._renewed.wait()


def _ms(seconds: float) -> float:
    return seconds * 1000
