"""Prompts, questions and ended streams as tests of the bridge want them; and a bridge that asks as
the product does, by a gateway's own way in, over a log in memory."""

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable
from schemas.records import (
    Answer,
    AnswerDelta,
    AnswerPart,
    Endpoint,
    OutcomeKind,
    Request,
    StreamRetrieved,
)
from schemas.rules.sizes import RECORD_BYTES_MAX
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import TopicPair
from streams.bridge.limits import TopicLimits
from streams.bridge.pending_prompt import PairIO, PendingPrompt
from streams.bridge.prompts import PromptParser, PromptQuestion
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.bridge.submitter import Submitter
from streams.calls.request.served import ModelCard
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Hub
from streams.calls.stream.stream import Stream
from streams.log.clients import Headers
from streams.log.transactions import OutgoingRecord
from tests.streams.gateway.in_process import FakeLog, InProcessGateway
from tests.streams.gateway.samples import MODEL, frame, parsed_frame, stream_end

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
    """Return what the topics of the sample pair take."""
    return TopicLimits(bytes_by_topic={"rows.answers": answers, "rows.dlq": letters})


def record(value: Any, **fields: Any) -> PromptRecord:
    """Return a prompt record; values that are not bytes become JSON."""
    if not isinstance(value, bytes | None):
        value = json.dumps(value, ensure_ascii=False).encode()
    usual: dict[str, Any] = {"partition": 1, "offset": 7, "timestamp_ms": 5, "key": b"k"}
    return PromptRecord(topic="rows", value=value, **{**usual, **fields})


async def question_of(
    value: Any, of: TopicPair | None = None, url: str = "", **fields: Any
) -> PromptQuestion:
    """Return the question of a value on a pair's topic; `url` is a schema registry's."""
    question = await prompts(of or pair(), url).question(record(value, **fields))
    assert question is not None
    return question


def prompts(of: TopicPair, url: str = "") -> PromptParser:
    """Return the parser of a pair's prompts."""
    return PromptParser(of, MODEL, CODEC, WriterSchemas(url, 60_000))


def body_of(question: PromptQuestion) -> dict[str, Any]:
    """Return the body as an API client would have sent it."""
    return question.body.model_dump(exclude_unset=True, by_alias=True)


def stream(*texts: str, retrieved: StreamRetrieved | None = None, **end: Any) -> Stream:
    """Return a stream that has ended after these tokens."""
    answer_stream = Stream("q1", restarts=True)
    for i, text in enumerate(texts):
        answer_stream.push(1, i, len("".join(texts[:i])), 1, text, [i])
    if retrieved is not None:
        answer_stream.note_retrieved(retrieved)
    assert answer_stream.finish(stream_end("q1", texts, kind=OutcomeKind.COMPLETED, **end))
    return answer_stream


class Parts:
    """Stands in for the producer of answer parts."""

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
        assert [header[1] for header in headers[:3]] == [
            str(coordinate).encode() for coordinate in origin
        ]
        self.parts.append(part)
        await self.has_room.wait()
        delivery = asyncio.get_running_loop().create_future()
        if self.trouble is None:
            delivery.set_result(None)
        else:
            delivery.set_exception(self.trouble)
        return delivery


class Log(FakeLog):
    """The log of a bridge: finds workers by itself, and reads `objects`."""

    epoch = 1

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.producer = Parts()
        self.failures = 0  # that many requests are not taken

    @property
    def positions(self) -> dict[int, int]:
        return {self.partition: len(self.frames)}

    def tokens_position(self) -> tuple[int, int]:
        return self.reply_position()

    async def send(self, record: Any, headers: Any = ()) -> None:
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("away")
        await super().send(record, headers)


class AskingBridge:
    """A bridge that submits prompts of one pair."""

    def __init__(
        self,
        of: TopicPair | None = None,
        *,
        cluster: str = "",
        other_cards: Sequence[ModelCard] = (),
    ) -> None:
        gateway = InProcessGateway(other_cards=other_cards)
        calls = gateway.state.calls
        self.log = log = Log(calls.hub)
        calls.fleet = calls.log = log
        self.table, self.pool = gateway.objects.table, gateway.pool
        process: Any = SimpleNamespace(
            calls=calls, member=log, sender=log, tokens=log, pool=self.pool
        )
        self.asking = Submitter(process, lambda: gateway.objects.table, cluster)
        of = of or pair(format="avro", parts="rows.parts")
        prompts = PromptParser(of, MODEL, CODEC, WriterSchemas("", 1))
        self.ends = PairIO(of, prompts, AnswerBuilder(of, CODEC))
        self.may_send: list[int] = []

    async def pending_prompt(self, prompt: PromptRecord) -> PendingPrompt:
        return PendingPrompt(prompt, self.ends, question=await self.ends.prompts.question(prompt))

    async def settle(self, prompt: PromptRecord | None = None) -> list[OutgoingRecord]:
        """Return what is committed of a prompt."""

        async def may_send(partition: int) -> None:
            self.may_send.append(partition)

        pending_prompt = await self.pending_prompt(
            prompt or record({"text": "hi", "max_tokens": 9})
        )
        return await self.asking.settle(pending_prompt, may_send)

    async def begin(self) -> tuple[asyncio.Future[list[OutgoingRecord]], str]:
        """Submit the first prompt; return its settling future and its request id."""
        settling = asyncio.ensure_future(self.settle())
        await self.log.wait_sent(1)
        return settling, self.log.requests[0].request_id

    def answer(self, *texts: str, **end: Any) -> Answering:
        def respond(request: Request) -> None:
            token_frame = frame(
                request.request_id, list(texts), end=stream_end(request.request_id, texts, **end)
            )
            self.log.hub.apply(token_frame, asyncio.get_running_loop().time())

        return respond

    def call(self, *deltas: AnswerDelta) -> Answering:
        """Answer with one token that is parsed to these deltas."""

        def respond(request: Request) -> None:
            parsed = parsed_frame(request.request_id, *deltas, finish_reason="tool_calls")
            self.log.hub.apply(parsed, asyncio.get_running_loop().time())

        return respond

    def fail(self, error: Any) -> Answering:
        return self.answer(kind=OutcomeKind.FAILED, error=error.to_wire())

    def answer_in_turn(self, *answers: Answering) -> None:
        """Answer each request in turn; the last answer repeats."""
        remaining = list(answers)
        self.log.on_request = lambda request: (remaining.pop(0) if remaining[1:] else remaining[0])(
            request
        )


def answer_of(sends: list[OutgoingRecord]) -> Answer:
    answer: Answer = CODEC.decode(sends[0].value)
    return answer
