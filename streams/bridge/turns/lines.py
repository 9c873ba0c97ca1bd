"""Which prompts are lines of batches, whose these are, and whether anybody waits for them."""

from collections.abc import Callable

from schemas.errors import NotReady
from schemas.log.clock import wall_ms
from streams.bridge.records.record import PromptRecord
from streams.gateway.objects.batches import tenant_of
from streams.gateway.objects.table import ObjectTable


class BatchLines:
    """By their topic and their keys."""

    def __init__(self, topic: str, table: Callable[[], ObjectTable]) -> None:
        """`table` raises NotReady while it is not known."""
        self._topic, self._table = topic, table

    def tenant(self, record: PromptRecord) -> str:
        """Whose a line is; empty for other prompts."""
        return tenant_of(_key(record)) if record.topic == self._topic else ""

    def owner(self, record: PromptRecord) -> str:
        """Who takes turns with others: a line's tenant, or whoever writes to a topic."""
        return f"{record.topic}/{self.tenant(record)}"

    def is_given_up(self, record: PromptRecord) -> bool:
        """Whether it is a line of a batch that was cancelled, or has ended otherwise."""
        if record.topic != self._topic:
            return False
        try:
            return self._table().batches.is_given_up(_key(record), wall_ms())
        except NotReady:
            return False


def _key(record: PromptRecord) -> str:
    return (record.key or b"").decode(errors="replace")
