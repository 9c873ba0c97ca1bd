"""Topics of prompts and answers as strangers use them: plain JSON in, JSON out, plain clients."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas.settings import LogSettings
from streams.log.connecting import stop_consumer

Place = tuple[int, int]  # partition and offset of a prompt


@dataclass
class Sent:
    """What was produced, in order."""

    keys: dict[Place, str] = field(default_factory=dict)
    texts: dict[Place, str] = field(default_factory=dict)


async def produce(
    log: LogSettings,
    topic: str,
    values: Sequence[tuple[str, Mapping[str, Any] | str]],
    sent_prompts: Sent,
) -> None:
    """Each as JSON under its key; a text as it is."""
    producer = AIOKafkaProducer(bootstrap_servers=log.bootstrap, acks="all", linger_ms=5)
    await producer.start()
    try:
        for key, value in values:
            raw = value if isinstance(value, str) else json.dumps(value)
            metadata = await producer.send_and_wait(topic, raw.encode(), key=key.encode())
            sent_prompts.keys[metadata.partition, metadata.offset] = key
            sent_prompts.texts[metadata.partition, metadata.offset] = raw
    finally:
        await producer.stop()


@dataclass
class Read:
    """What lies on a topic of answers, as a reader of committed records sees it."""

    values: dict[Place, list[Any]] = field(default_factory=dict)
    order: dict[int, list[tuple[str, Place]]] = field(default_factory=dict)  # by partition
    headers: dict[Place, dict[str, bytes]] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[int]:
        """How many prompts have so many answers."""
        return Counter(len(answers) for answers in self.values.values())


class AnswerReader:
    """Reads answers as they come, committed ones only."""

    def __init__(self, log: LogSettings, topic: str) -> None:
        self._log, self._topic = log, topic
        self.read = Read()

    async def __aenter__(self) -> "AnswerReader":
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._log.bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            request_timeout_ms=30_000,
        )
        await self._consumer.start()
        self._consumer.assign(
            [TopicPartition(self._topic, p) for p in range(self._log.prompt_partitions)]
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_consumer(self._consumer)  # also while the broker is away

    async def read_more(self, timeout_ms: int = 500) -> Read:
        """Read the answers that have come meanwhile."""
        batches = await self._consumer.getmany(timeout_ms=timeout_ms)
        for tp, records in batches.items():
            for record in records:
                headers = dict(record.headers)
                place = (
                    int(headers["trivium-prompt-partition"]),
                    int(headers["trivium-prompt-offset"]),
                )
                value = None if record.value is None else json.loads(record.value)
                self.read.values.setdefault(place, []).append(value)
                key = record.key.decode()
                self.read.order.setdefault(tp.partition, []).append((key, place))
                self.read.headers[place] = headers
        return self.read

    async def until(self, prompts: int) -> Read:
        """Wait for answers to so many prompts."""
        while len((await self.read_more()).values) < prompts:
            await asyncio.sleep(0)
        return self.read
