"""Acknowledges records in the order of their partition, though they are done in any order.

Faust commits past a record that is still in flight when a later one is acknowledged (its defect
606), so an acknowledgement waits for all earlier ones of its partition.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Partition = tuple[str, int]  # topic and partition


@dataclass(slots=True, eq=False)
class Receipt:
    """One record that was taken."""

    acknowledge: Callable[[], object]
    is_done: bool = False


class Receipts:
    """Records taken and not yet acknowledged, by partition."""

    def __init__(self) -> None:
        self._open: dict[Partition, deque[Receipt]] = {}

    def open(self, partition: Partition, acknowledge: Callable[[], object]) -> Receipt:
        """The next record of a partition."""
        receipt = Receipt(acknowledge)
        self._open.setdefault(partition, deque()).append(receipt)
        return receipt

    def close(self, partition: Partition, receipt: Receipt) -> None:
        """A record is done with."""
        receipt.is_done = True
        waiting = self._open.get(partition)
        while waiting and waiting[0].is_done:
            waiting.popleft().acknowledge()

    def drop(self) -> None:
        """Acknowledge none of what waits: the partitions were taken away."""
        self._open.clear()
