"""In place of `trivium run bridge`: answers what lies on `batch.prompts`, once each."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.records import Answer, Prompt
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.transactions import OutgoingRecord, Transactions
from tests.waits import meanwhile

CODEC = Codec()
Reply = Callable[[dict[str, Any]], dict[str, Any] | None]  # None: it is never answered


def answered(body: dict[str, Any]) -> dict[str, Any]:
    """Fields of the answer to a call."""
    question = body["messages"][-1]["content"]
    return {"body": json.dumps({"echo": question}), "prompt_tokens": 3, "completion_tokens": 2}


class StandIn:
    """What it was asked, by key."""

    def __init__(self, log: LogSettings, reply: Reply) -> None:
        self._log, self._reply = log, reply
        self.prompt_counts: Counter[str] = Counter()
        self.answered = 0
        self.is_reading, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def run(self) -> None:
        """Until cancelled."""
        partitions = range(self._log.prompt_partitions)
        reader = AssignedReader(
            self._log, "batch.prompts", partitions, client_id="stand-in", committed_only=True
        )
        writer = Transactions(self._log, f"stand-in-{uuid4().hex}")
        await writer.start()
        sends: list[OutgoingRecord] = []
        try:
            async with reader.reading("latest"):
                self.is_reading.set()
                while True:
                    records = await reader.batch(max_records=100, timeout_ms=1_000)
                    sends += [answer for answer in map(self._answer, records) if answer is not None]
                    if sends and self.may_answer.is_set():
                        await writer.commit(sends)
                        self.answered += len(sends)
                        sends = []
        finally:
            await writer.stop()

    def _answer(self, record: ConsumerRecord) -> OutgoingRecord | None:
        key, prompt = record.key.decode(), CODEC.decode(record.value)
        assert isinstance(prompt, Prompt) and prompt.body is not None
        self.prompt_counts[key] += 1
        if (fields := self._reply(json.loads(prompt.body))) is None:
            return None
        answer = Answer(
            prompt_topic=record.topic,
            prompt_partition=record.partition,
            prompt_offset=record.offset,
            request_id=f"r{record.partition}-{record.offset}",
            **fields,
        )
        return OutgoingRecord(
            topic=self._log.topic_prefix + "batch.answers",
            partition=record.partition,
            key=record.key,
            value=CODEC.encode(answer),
        )


@contextlib.asynccontextmanager
async def standing_in(log: LogSettings, reply: Reply = answered) -> AsyncIterator[StandIn]:
    """From what is asked from now on."""
    stand_in = StandIn(log, reply)
    async with meanwhile(stand_in.run()):
        await stand_in.is_reading.wait()
        yield stand_in
