"""Decides when failed KV moves are retried: after a pause that doubles with each failure.

Pure: time is an argument. Used by both engines.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Move = TypeVar("Move", bound=Hashable)


class Retries(Generic[Move]):
    """Moves that have failed, including those that wait for their next try."""

    def __init__(self, tries_max: int, pause_s: float) -> None:
        self._tries_max, self._pause_s = tries_max, pause_s
        self._failures: dict[Move, int] = {}
        self._waiting: dict[Move, int] = {}  # serial number of the move's entry in the queue
        self._queue: list[tuple[float, int, Move]] = []
        self._serial = 0
        self.total = 0

    def __len__(self) -> int:
        """Return the number of moves that wait for a retry."""
        return len(self._waiting)

    def __contains__(self, move: Move) -> bool:
        """Return whether a move waits for its next try."""
        return move in self._waiting

    def tries(self, move: Move) -> int:
        """Return how often a move has failed so far."""
        return self._failures.get(move, 0)

    def record_failure(self, move: Move, now_s: float) -> bool:
        """Count a failure; return whether the move waits for another try."""
        failures = self._failures[move] = self.tries(move) + 1
        if failures >= self._tries_max:
            return False
        self._serial += 1
        self.total += 1
        self._waiting[move] = self._serial
        pause_s = self._pause_s * 2 ** (failures - 1)
        heapq.heappush(self._queue, (now_s + pause_s, self._serial, move))
        return True

    def due(self, now_s: float) -> list[Move]:
        """Return the moves whose pause is over; they no longer wait."""
        moves = []
        while self._queue and self._queue[0][0] <= now_s:
            _, serial, move = heapq.heappop(self._queue)
            if self._waiting.get(move) == serial:
                del self._waiting[move]
                moves.append(move)
        return moves

    def forget(self, move: Move) -> None:
        """Drop a move that has succeeded or is no longer needed."""
        self._failures.pop(move, None)
        self._waiting.pop(move, None)
