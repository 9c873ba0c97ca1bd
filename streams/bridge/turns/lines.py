"""Finds the tenant of a batch's line, and whether its batch was cancelled or has ended."""

from collections.abc import Callable

from schemas.errors import NotReady
from streams.bridge.records.record import PromptRecord
from streams.log.clock import wall_ms
from streams.openai.objects.batches import tenant_of
from streams.openai.objects.table import ObjectTable


class BatchLines:
    """The lines of batches, by their topic and their keys."""

    def __init__(self, topic: str, table: Callable[[], ObjectTable]) -> None:
        """Create one; `table` raises NotReady until the table of objects is read."""
        self._topic, self._table = topic, table

    def tenant(self, record: PromptRecord) -> str:
        """Return the tenant of a line; empty for other prompts."""
        return tenant_of(_key(record)) if record.topic == self._topic else ""

    def owner(self, record: PromptRecord) -> str:
        """Return the owner of a slot: the topic, with the tenant for a line."""
        return f"{record.topic}/{self.tenant(record)}"

    def is_given_up(self, record: PromptRecord) -> bool:
        """Return whether it is a line of a batch that was cancelled or has ended."""
        if record.topic != self._topic:
            return False
        try:
            return self._table().batches.is_given_up(_key(record), wall_ms())
        except NotReady:
            return False


def _key(record: PromptRecord) -> str:
    return (record.key or b"").decode(errors="replace")
