"""Counts Flink's rows and their answers in the raw topics, without code of Trivium.

Reads committed records only, and decodes their JSON.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, ConsumerRecord

Key = tuple[str, int, int] | str


@dataclass(slots=True)
class RowCounts:
    """Counts of each row and of each error in one topic."""

    rows: Counter[Key] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    times_ms: list[int] = field(default_factory=list)  # in the order of reading

    @property
    def double(self) -> int:
        """Number of records beyond the first of each row."""
        return sum(self.rows.values()) - len(self.rows)

    def missing(self, expected: Sequence[Key]) -> int:
        """Return how many expected rows the topic does not contain."""
        return sum(row not in self.rows for row in expected)


def steady_rate(times_ms: Sequence[int], until_ms: int) -> float:
    """Return records per second from the first until `until_ms`; 0 without any."""
    counted = [time_ms for time_ms in times_ms if time_ms <= until_ms]
    seconds = (until_ms - min(counted, default=until_ms)) / 1_000
    return (len(counted) - 1) / seconds if seconds else 0.0


Look = Callable[[ConsumerRecord, dict[str, Any]], tuple[Key, str]]


def own_row(record: ConsumerRecord, value: dict[str, Any]) -> tuple[Key, str]:
    """Return the id and the error of a row that Flink wrote."""
    return str(value["id"]), value.get("error") or ("" if value.get("answer") else "empty")


def prompt_row(record: ConsumerRecord, value: dict[str, Any]) -> tuple[Key, str]:
    """Return topic, partition and offset of a prompt."""
    return (record.topic, record.partition, record.offset), ""


def answer_row(record: ConsumerRecord, value: dict[str, Any]) -> tuple[Key, str]:
    """Return topic, partition and offset of the answered prompt, and the error code."""
    prompt = (value["prompt_topic"], value["prompt_partition"], value["prompt_offset"])
    return prompt, value.get("error_code") or ""


class RowReader:
    """Reads topics from their beginning; each `read` continues where the last one ended."""

    def __init__(self, bootstrap: str, topics: dict[str, Look]) -> None:
        self.counts = {topic: RowCounts() for topic in topics}
        self._topics = topics
        self._consumer = AIOKafkaConsumer(  # without a group: all partitions of the topics
            *topics,
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._consumer.stop()

    async def read(self, *, wait_ms: int = 500) -> None:
        """Count the records that have arrived since the last call; waits up to `wait_ms`."""
        for records in (await self._consumer.getmany(timeout_ms=wait_ms)).values():
            for record in records:
                row, error = self._topics[record.topic](record, json.loads(record.value))
                topic_counts = self.counts[record.topic]
                topic_counts.rows[row] += 1
                topic_counts.times_ms.append(record.timestamp)
                if error:
                    topic_counts.errors[error] += 1
