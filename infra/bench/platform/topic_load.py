"""Sends prompts to their topic as fast as the broker accepts them, and counts the answers.

Writes a note for each prompt that the broker has acknowledged. Does not check that each prompt has
its answer: `checker.py` does.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.bench.platform.questions import LoadQuestion
from schemas.codec import Codec
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.connecting import client_options, stop_consumer

_AT_ONCE = 2_000  # sent and not acknowledged
_PATIENCE_MS = 180_000  # the run fails if the broker does not acknowledge a prompt in this time
_OFFSET = "trivium-prompt-offset"


class TopicLoad:
    """Sends one set of prompts to their topic and counts the answers."""

    def __init__(self, log: LogSettings, notes: Path) -> None:
        self._log, self._notes = log, notes
        self.answered: set[tuple[int, bytes]] = set()  # partition and offset of prompts
        self.sent_count = 0
        self.began_s = self.sent_s = self.ended_s = 0.0

    async def run(
        self,
        questions: Iterable[LoadQuestion],
        count: int,
        codec: Codec,
        on_progress: Callable[[int], None],
    ) -> None:
        """Send all questions and return when `count` prompts have answers."""
        answers = await self._follow()
        self.began_s = time.monotonic()
        sending = asyncio.create_task(self._send(questions, codec))
        try:
            while len(self.answered) < count:
                if sending.done():
                    sending.result()
                for got in (await answers.getmany(timeout_ms=250)).values():
                    for record in got:
                        offset = dict(record.headers).get(_OFFSET, b"")
                        self.answered.add((record.partition, offset))
                on_progress(len(self.answered))
            self.ended_s = time.monotonic()
        finally:
            await cancel_and_wait(sending)
            await stop_consumer(answers)  # the broker may be down

    async def _follow(self) -> AIOKafkaConsumer:
        """Return a consumer at the end of the topic of answers."""
        consumer = AIOKafkaConsumer(
            **client_options(self._log),
            isolation_level="read_committed",
            enable_auto_commit=False,
            client_id="bench-answers",
        )
        await consumer.start()
        topic = f"{self._log.topic_prefix}answers"
        places = [TopicPartition(topic, n) for n in range(self._log.prompt_partitions)]
        consumer.assign(places)
        await consumer.seek_to_end(*places)
        return consumer

    async def _send(self, questions: Iterable[LoadQuestion], codec: Codec) -> None:
        producer = AIOKafkaProducer(
            **client_options(self._log) | {"request_timeout_ms": _PATIENCE_MS},
            client_id="bench-prompts",
            enable_idempotence=True,
            linger_ms=5,
        )
        await producer.start()
        slots, topic = asyncio.Semaphore(_AT_ONCE), f"{self._log.topic_prefix}prompts"
        try:
            with self._notes.open("a") as notes:

                async def send(question: LoadQuestion) -> None:
                    key, value = question.key.encode(), question.prompt(codec)
                    ack = await producer.send(topic, value, key=key)
                    at = await ack
                    slots.release()
                    note = {"p": at.partition, "o": at.offset, "number": question.number}
                    notes.write(json.dumps(note) + "\n")
                    self.sent_count += 1

                async with asyncio.TaskGroup() as group:
                    for question in questions:
                        await slots.acquire()
                        group.create_task(send(question))
        finally:
            await producer.stop()
        self.sent_s = time.monotonic()
