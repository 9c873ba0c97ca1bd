"""Prompts, questions and ended streams as tests of the bridge want them; and a bridge that asks as
the product does, by a gateway's own way in, over a log in memory."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable
from schemas.log.clients import Headers
from schemas.log.transactions import OutgoingRecord
from schemas.records import Answer, AnswerPart, Endpoint, OutcomeKind, Request, StreamRetrieved
from schemas.rules.sizes import RECORD_BYTES_MAX
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import TopicPair
from streams.bridge.limits import TopicLimits
from streams.bridge.pending_prompt import PairIO, PendingPrompt
from streams.bridge.prompts import PromptParser, PromptQuestion
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.bridge.submitter import Submitter
from streams.gateway.stream.event_id import StreamKey
from streams.gateway.stream.hub import Hub
from streams.gateway.stream.stream import Stream
from tests.streams.gateway.in_process import FakeLog, InProcessGateway
from tests.streams.gateway.samples import MODEL, ended, frame

CODEC = Codec()
Answering = Callable[[Request], None]
KEY = StreamKey(
    parent_id="q1",
    session_id="s1",
    model=MODEL,
    endpoint=Endpoint.CHAT,
    partition=0,
    offset=0,
    created_s=1,
    deadline_ms=9_000,
    choices=1,
)


def pair(**fields: Any) -> TopicPair:
    return TopicPair(**{"prompts": "rows", "answers": "rows.answers", **fields})


def limits(answers: int, *, letters: int = RECORD_BYTES_MAX) -> TopicLimits:
    """What topics of that pair take."""
    return TopicLimits(bytes_by_topic={"rows.answers": answers, "rows.dlq": letters})


def record(value: Any, **fields: Any) -> PromptRecord:
    """A prompt's record: bytes as they are, anything else as JSON."""
    if not isinstance(value, bytes | None):
        value = json.dumps(value, ensure_ascii=False).encode()
    usual: dict[str, Any] = {"partition": 1, "offset": 7, "timestamp_ms": 5, "key": b"k"}
    return PromptRecord(topic="rows", value=value, **{**usual, **fields})


async def asked(
    value: Any, of: TopicPair | None = None, url: str = "", **fields: Any
) -> PromptQuestion:
    """What a value asks on a pair's topic; `url` is a schema registry's."""
    found = await prompts(of or pair(), url).question(record(value, **fields))
    assert found is not None
    return found


def prompts(of: TopicPair, url: str = "") -> PromptParser:
    """What reads those of a pair."""
    return PromptParser(of, MODEL, CODEC, WriterSchemas(url, 60_000))


def body_of(question: PromptQuestion) -> dict[str, Any]:
    """As a client of the API would have sent it."""
    return question.body.model_dump(exclude_unset=True, by_alias=True)


def stream(*texts: str, retrieved: StreamRetrieved | None = None, **end: Any) -> Stream:
    """One that has ended after these tokens."""
    found = Stream("q1", restarts=True)
    for i, text in enumerate(texts):
        found.push(1, i, len("".join(texts[:i])), 1, text, [i])
    if retrieved is not None:
        found.note_retrieved(retrieved)
    assert found.finish(ended("q1", texts, kind=OutcomeKind.COMPLETED, **end))
    return found


class Parts:
    """The producer of parts."""

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self.has_room = asyncio.Event()  # cleared: whoever sends waits, as where a buffer is full
        self.has_room.set()
        self.trouble: Exception | None = None  # that the log has with each

    async def send_raw(
        self, topic: str, value: bytes, *, key: bytes, partition: int, headers: Headers
    ) -> asyncio.Future[None]:
        part: AnswerPart = CODEC.decode(value)
        assert (topic, partition) == ("rows.parts", 0) and key
        origin = (part.prompt_topic, part.prompt_partition, part.prompt_offset)
        assert [header[1] for header in headers[:3]] == [str(each).encode() for each in origin]
        self.parts.append(part)
        await self.has_room.wait()
        done = asyncio.get_running_loop().create_future()
        if self.trouble is None:
            done.set_result(None)
        else:
            done.set_exception(self.trouble)
        return done


class Log(FakeLog):
    """Of a bridge: it asks whether or not a worker is there, and reads `objects`."""

    epoch = 1

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.producer = Parts()
        self.failures = 0  # that many requests are not taken

    def tokens_position(self) -> tuple[int, int]:
        return self.reply_position()

    @property
    def tokens_read(self) -> dict[int, int]:
        return {self.partition: len(self.frames)}

    async def send(self, record: Any, headers: Any = ()) -> None:
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("away")
        await super().send(record, headers)


class AskingBridge:
    """Asks for one pair."""

    def __init__(self, of: TopicPair | None = None, *, cluster: str = "") -> None:
        gateway = InProcessGateway()
        self.log = Log(gateway.state.hub)
        self.log.objects = gateway.objects  # type: ignore[attr-defined]  # as the product's
        gateway.state.backend = self.log
        self.table, self.pool = gateway.objects.table, gateway.pool
        self.asking = Submitter(gateway.state, self.log, cluster)  # type: ignore[arg-type]  # stands in
        of = of or pair(format="avro", parts="rows.parts")
        prompts = PromptParser(of, MODEL, CODEC, WriterSchemas("", 1))
        self.ends = PairIO(of, prompts, AnswerBuilder(of, CODEC))
        self.may_send: list[int] = []

    async def asked(self, made: PromptRecord) -> PendingPrompt:
        return PendingPrompt(made, self.ends, question=await self.ends.prompts.question(made))

    async def settle(self, made: PromptRecord | None = None) -> list[OutgoingRecord]:
        """What is committed of a prompt."""

        async def may_send(partition: int) -> None:
            self.may_send.append(partition)

        found = await self.asked(made or record({"text": "hi", "max_tokens": 9}))
        return await self.asking.settle(found, may_send)

    async def begin(self) -> tuple[asyncio.Future[list[OutgoingRecord]], str]:
        """The first prompt is asked, and settled meanwhile; the id of its request."""
        settling = asyncio.ensure_future(self.settle())
        await self.log.wait_sent(1)
        return settling, self.log.requests[0].request_id

    def answer(self, *texts: str, **end: Any) -> Answering:
        def said(request: Request) -> None:
            made = frame(
                request.request_id, list(texts), end=ended(request.request_id, texts, **end)
            )
            self.log.hub.apply(made, asyncio.get_running_loop().time())

        return said

    def fail(self, error: Any) -> Answering:
        return self.answer(kind=OutcomeKind.FAILED, error=error.to_wire())

    def each(self, *answers: Answering) -> None:
        """What becomes of the first request, of the second, and so on; of the last one's others."""
        left = list(answers)
        self.log.on_request = lambda request: (left.pop(0) if left[1:] else left[0])(request)


def told(sends: list[OutgoingRecord]) -> Answer:
    answer: Answer = CODEC.decode(sends[0].value)
    return answer
