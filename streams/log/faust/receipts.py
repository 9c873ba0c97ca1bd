"""Acknowledges records in the order of their partition, although they finish in any order.

Faust commits past a record that is still in flight when a later one is acknowledged (its defect
606), so an acknowledgement waits for all earlier ones of its partition.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Place = tuple[str, int]  # topic, without prefix, and partition


@dataclass(slots=True, eq=False)
class Receipt:
    """One record that was taken; `pending` is the number of its effects that are not done."""

    line: "deque[Receipt]"
    acknowledge: Callable[[], object]
    pending: int

    def settle(self, count: int = 1) -> None:
        """Count `count` effects as done. The last one acknowledges the record and those behind it
        that waited for it."""
        self.pending -= count
        while self.line and not self.line[0].pending:
            self.line.popleft().acknowledge()


class Receipts:
    """Records taken and not yet acknowledged, by partition."""

    def __init__(self) -> None:
        self._lines: dict[Place, deque[Receipt]] = {}

    def open(self, place: Place, acknowledge: Callable[[], object], pending: int = 1) -> Receipt:
        """Add the next record of a partition; with 0 pending it waits only for earlier ones."""
        line = self._lines.setdefault(place, deque())
        receipt = Receipt(line, acknowledge, pending)
        line.append(receipt)
        receipt.settle(0)
        return receipt

    def drop(self) -> None:
        """Drop all open receipts without acknowledgement: the partitions were revoked."""
        for line in self._lines.values():
            line.clear()
        self._lines.clear()
