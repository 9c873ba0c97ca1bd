"""The class of a row in the table of topics (`schemas/topics.py`)."""

from dataclasses import dataclass, field

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_LEASED = ("worker", "gateway", "asker")
# Processes that work in parallel, at most one for each partition of the group.
_SCALES = {
    "session": "routers",
    "worker": "workers of the role",
    "gateway": "gateways",
    "asker": "members that search",
    "prompt": "bridges",
    "retrieval": "copies of a shard",
    "document": "embedding workers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One row of the table.

    `key` names the record key; `group` names the partition count that topics share
    (`LogSettings.partitions`), and so what chooses the partition. `written_by` and `read_by` name
    kinds of processes; `anyone` means any client, and `replay` only observes.
    """

    name: str
    records: tuple[str, ...]
    key: str = "session"
    group: str = "session"
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    scales_with: str = ""  # if it differs from the group's
    retention_ms: int = DAY_MS
    cleanup: str = "delete"
    config: dict[str, str] = field(default_factory=dict)
    doc: str

    def subject(self, record: str) -> str:
        """Return the subject of the record's schemas in a schema registry.

        If the topic has one kind of record, Kafka's default, which other clients find without
        configuration (TopicNameStrategy); else one subject each (TopicRecordNameStrategy).
        """
        return f"{self.name}-value" if len(self.records) == 1 else f"{self.name}-trivium.{record}"

    @property
    def scales(self) -> str:
        """Return the kind of process that works on it in parallel, one for each partition; empty if
        all readers read the whole topic."""
        return self.scales_with or _SCALES.get(self.group, "")

    @property
    def retention(self) -> str:
        """Return in words for how long the topic keeps records."""
        hours = self.retention_ms // HOUR_MS
        time = f"{hours} h" if hours <= 24 else f"{hours // 24} days"
        last = "the last of each key"
        return {"delete": time, "compact": last}.get(self.cleanup, f"{last}, {time}")

    @property
    def partition_by(self) -> str:
        """Return what chooses the partition: `lease` if members lease one each, else the group."""
        return "lease" if self.group in _LEASED else self.group
