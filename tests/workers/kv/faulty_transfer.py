"""A transfer in memory whose moves a test holds back, fails and looks at."""

import time
from typing import Any

import numpy as np

from workers.kv.transfer import BlockMove, MemoryTransfer, MoveEnd, PollResult


class FaultyTransfer(MemoryTransfer):
    """Without faults it does what every transfer in memory does."""

    def __init__(self, engine_id: str, regions: "np.ndarray[Any, Any]") -> None:
        super().__init__(engine_id, regions)
        self.stalled = False
        self.failing = 0  # how many moves will fail
        self.moved: list[BlockMove] = []  # those that were made
        self._late_at_s: dict[int, float] = {}  # by tag, of moves that are to be made
        self._late: set[int] = set()  # of these, those that were told to be late

    def move(self, move: BlockMove) -> None:
        super().move(move)
        self._late_at_s[move.tag] = time.monotonic() + move.timeout_s

    def poll(self) -> PollResult:
        if not self.stalled:
            self._late_at_s.clear()
            self._late.clear()
            return super().poll()
        notices, self.notices = self.notices, []
        now_s = time.monotonic()
        late = {tag for tag, at_s in self._late_at_s.items() if now_s >= at_s} - self._late
        self._late |= late
        return PollResult([MoveEnd(tag, "late", settled=False) for tag in late], notices)

    def make(self, move: BlockMove) -> str:
        if self.failing:
            self.failing -= 1
            return f"engine {move.engine_id} is gone"
        error = super().make(move)
        if not error:
            self.moved.append(move)
        return error
