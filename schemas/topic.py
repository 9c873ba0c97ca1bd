"""What the table of topics (`schemas/topics.py`) says of each."""

from dataclasses import dataclass, field

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_LEASED = ("worker", "gateway", "asker")
# What there can be as many of, at work at once, as a topic of the group has partitions.
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

    `key` names what the record key is; `group` the partition count that the topic shares
    (`LogSettings.partitions` knows them), and so what chooses the partition. `written_by` and
    `read_by` name kinds of processes; `anyone` is whoever likes to, `replay` only looks on.
    """

    name: str
    records: tuple[str, ...]
    key: str = "session"
    group: str = "session"
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    scales_with: str = ""  # where it is not what the group says
    retention_ms: int = DAY_MS
    cleanup: str = "delete"
    config: dict[str, str] = field(default_factory=dict)
    doc: str

    def subject(self, record: str) -> str:
        """Where a schema registry keeps the record's schemas.

        Kafka's default where the topic has one kind of record, so that other clients find it
        without being told (TopicNameStrategy); else one subject each (TopicRecordNameStrategy).
        """
        return f"{self.name}-value" if len(self.records) == 1 else f"{self.name}-trivium.{record}"

    @property
    def scales(self) -> str:
        """What works on it in parallel, one for each partition; empty if it is read whole."""
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
        """What chooses the partition: its lease where members have one each, else the group."""
        return "lease" if self.group in _LEASED else self.group
