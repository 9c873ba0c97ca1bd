"""Lives of a partition of prompts over a log in memory; tests say what is answered.

The log keeps what matters to a life: who has the transactional id, what is committed, how large
records may be, which prompts lie where. It commits all or nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, Fenced, RecordTooLarge, TriviumError
from schemas.records import Answer, TokenFrame
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from streams.bridge import partition_processor
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import TopicPair
from streams.bridge.dead_letters import dead_letter
from streams.bridge.partition_processor import PartitionProcessor, ProcessorContext
from streams.bridge.pending_prompt import PairIO, PendingPrompt
from streams.bridge.progress import CommitNote, decode
from streams.bridge.prompts import PromptParser
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.bridge.turns.slots import ModelSlots, Slots
from streams.calls.stream.hub import Call, Hub
from streams.log.transactions import CommittedOffset, FullPlace, OutgoingRecord
from tests.streams.bridge.samples import KEY, pair, record
from tests.streams.gateway.samples import MODEL
from tests.waits import pass_time

CODEC = Codec()
PLACE: FullPlace = ("rows", 1)
GROUP = "bridge"
TOKENS = {3: 100}  # what this bridge reads: partition of `tokens`, and how far


def _nothing() -> None:
    pass


@dataclass
class MemoryLog:
    """One partition of prompts, and what is committed for it."""

    prompts: list[PromptRecord] = field(default_factory=list)
    end: int = 0  # behind the last prompt and the marks of transactions
    owner: object = None
    position: CommittedOffset | None = None
    records: list[OutgoingRecord] = field(default_factory=list)
    commits: int = 0
    commit_s: float = 0.01  # how long one takes
    bytes_max: dict[str, int] = field(default_factory=dict)  # by topic
    trouble: TriviumError | None = None  # of the next commit
    gaps: list[tuple[int, int]] = field(default_factory=list)  # that were looked into
    replayed: list[tuple[int, int]] = field(default_factory=list)  # partition of tokens, offset
    tokens_end: int = 0  # of each of these
    frames: list[TokenFrame] = field(default_factory=list)  # of any of these, from offset 0 on
    before_replay: Callable[[], None] = _nothing
    slow_to_stop_s: float = 0.0  # whoever has its transactional id

    def put(self, offset: int, value: Any = None, key: bytes = b"k") -> PromptRecord:
        """Append a prompt to the log."""
        value = {"text": f"question {offset}"} if value is None else value
        prompt = record(value, offset=offset, key=key)
        self.prompts.append(prompt)
        self.end = offset + 1
        return prompt

    def answers(self) -> dict[int, Answer]:
        """Return the answers by offset; fail where a prompt has two."""
        by_offset: dict[int, Answer] = {}
        for outgoing in self.records:
            if outgoing.topic == "rows.answers":
                answer: Answer = CODEC.decode(outgoing.value)
                assert answer.prompt_offset not in by_offset, "answered twice"
                by_offset[answer.prompt_offset] = answer
        return by_offset

    @property
    def note(self) -> CommitNote:
        """Return the note of the last commit."""
        assert self.position is not None
        return decode(self.position.metadata, self.position.offset)

    @property
    def letters(self) -> list[dict[str, bytes]]:
        """Return the headers of the dead letters."""
        return [dict(outgoing.headers) for outgoing in self.records if outgoing.topic == "rows.dlq"]


class MemoryTransactions:
    """Stands in for `Transactions`; unusable after any error."""

    log: MemoryLog

    def __init__(self, settings: LogSettings, transactional_id: str) -> None:
        assert isinstance(settings, LogSettings) and transactional_id == "bridge-rows-1"
        self._is_open = False

    async def start(self) -> None:
        self.log.owner, self._is_open = self, True

    async def commit(
        self,
        sends: Sequence[OutgoingRecord],
        positions: dict[FullPlace, CommittedOffset],
        group_id: str,
    ) -> None:
        assert group_id == GROUP
        log = self.log
        await pass_time(log.commit_s)
        if log.owner is not self:
            raise Fenced("another process writes this now")
        if not self._is_open:
            raise BrokerUnavailable("not started")
        trouble, log.trouble = log.trouble, None
        if any(
            outgoing.bytes_at_most > log.bytes_max.get(outgoing.topic, 1 << 20)
            for outgoing in sends
        ):
            trouble = RecordTooLarge("not sent: larger than max.message.bytes")
        if trouble is not None:
            self._is_open = False
            raise trouble
        log.records += sends
        log.position = positions[PLACE]
        log.commits += 1

    async def stop(self) -> None:
        self._is_open = False
        await pass_time(self.log.slow_to_stop_s)

    async def restart(self) -> None:
        await self.stop()
        await self.start()


class MemoryPast:
    """Stands in for `PromptLogReader`."""

    log: MemoryLog

    def __init__(self, settings: LogSettings, place: FullPlace, client_id: str) -> None:
        assert isinstance(settings, LogSettings) and place == PLACE and client_id
        self.is_closed = False

    async def bounds(self) -> tuple[int, int]:
        return 0, self.log.end

    async def records(self, since: int, until: int) -> AsyncGenerator[PromptRecord]:
        for prompt in self.log.prompts:
            if since <= prompt.offset < until:
                yield prompt

    async def gap(self, since: int, until: int) -> AsyncGenerator[PromptRecord]:
        assert not self.is_closed
        self.log.gaps.append((since, until))
        async for prompt in self.records(since, until):
            yield prompt

    async def close(self) -> None:
        self.is_closed = True


class StubAsking:
    """Stands in for `Submitter`; `answer` and `fail` settle submitted prompts."""

    def __init__(self) -> None:
        self.process = SimpleNamespace(
            member=SimpleNamespace(epoch=1), tokens=SimpleNamespace(positions=dict(TOKENS))
        )
        self.calls = SimpleNamespace(hub=Hub())
        self.vector_slots = Slots(lambda: 1)
        self.submitted_offsets: list[int] = []  # offsets, in order
        self.begun_offsets: list[int] = []  # those listened to before that
        self.early_errors: dict[int, TriviumError] = {}  # of tokens that are there already
        self.given_up: set[int] = set()
        self.lines = SimpleNamespace(
            is_given_up=lambda record: record.offset in self.given_up,
            owner=lambda record: (record.key or b"").decode(),
        )
        self.begins: set[int] = set()  # what these tell the beginning of
        self._waiting: dict[int, asyncio.Future[list[OutgoingRecord] | TriviumError]] = {}

    def begin(self, prompt: PendingPrompt, _: Container[int] = ()) -> Call:
        prompt.starts.setdefault(*next(iter(self.process.tokens.positions.items())))
        prompt.tries += 1
        self.begun_offsets.append(prompt.record.offset)
        return Call(KEY, deadline_ms=1, arrived_s=0.0, waits_for_end=True)

    def model_of(self, _: PendingPrompt) -> Any:
        return SimpleNamespace(name=MODEL, model=MODEL)

    async def check(self, prompt: PendingPrompt) -> None:
        """Check that there is a question to tokenise."""
        assert prompt.question is not None

    def has_output(self, prompt: PendingPrompt) -> bool:
        return prompt.record.offset in self.begins

    def release(self, prompt: PendingPrompt) -> None:
        prompt.call = None

    async def outcome(self, prompt: PendingPrompt) -> TriviumError | None:
        return self.early_errors.pop(prompt.record.offset, None)

    def should_retry(self, prompt: PendingPrompt, error: TriviumError) -> bool:
        return error.retriable and prompt.tries < prompt.pair_io.pair.tries_max

    async def settle(self, prompt: PendingPrompt, may_send: Any) -> list[OutgoingRecord]:
        offset = prompt.record.offset
        prompt.starts.setdefault(*next(iter(TOKENS.items())))
        await may_send(3)
        self.submitted_offsets.append(offset)
        result = await self._waiting.setdefault(offset, asyncio.get_running_loop().create_future())
        return self.error_records(prompt, result) if isinstance(result, TriviumError) else result

    def answer(self, offset: int, text: str = "yes", metadata: str | None = None) -> None:
        answer = Answer(
            prompt_topic="rows",
            prompt_partition=1,
            prompt_offset=offset,
            prompt_ms=5,
            text=text,
            metadata=metadata,
        )
        answers = AnswerBuilder(pair(format="avro"), CODEC)
        self._future(offset).set_result([answers.sending(record({}, offset=offset), answer)])

    def fail(self, offset: int, error: TriviumError) -> None:
        self._future(offset).set_result(error)

    def _future(self, offset: int) -> Any:
        loop = asyncio.get_running_loop()
        return self._waiting.setdefault(offset, loop.create_future())

    def error_records(
        self, prompt: PendingPrompt, error: TriviumError, *, steps: int = 0
    ) -> list[OutgoingRecord]:
        answers, prompt.error = prompt.pair_io.answers, error
        answer = answers.error_answer(prompt.record, error, question=prompt.question)
        return [
            answers.sending(prompt.record, answer, steps=steps),
            dead_letter(prompt.record, error, bytes_max=0 if steps else RECORD_BYTES_MAX),
        ]

    def fitting(self, sending: OutgoingRecord) -> OutgoingRecord:
        return sending


class Bridge:
    """What the processors of one bridge process share."""

    def __init__(self, log: MemoryLog, of: TopicPair | None = None) -> None:
        self.log, self.asking = log, StubAsking()
        self.asks_by(self.asking, of)

    def asks_by(self, asking: Any, of: TopicPair | None = None) -> None:
        """Set what submits prompts: a stub, or a real `Submitter`."""
        self.troubles: list[BaseException] = []
        self.lives: list[PartitionProcessor] = []
        of = replace(of or pair(), format="avro")
        prompts = PromptParser(of, MODEL, CODEC, WriterSchemas("", 1))
        self.ends = PairIO(of, prompts, AnswerBuilder(of, CODEC))
        self.shared = ProcessorContext(
            log=LogSettings(),
            codec=CODEC,
            bridge_id="bridge-0",
            group_id=GROUP,
            submitter=asking,
            slots=ModelSlots([MODEL], lambda *_: 8),
            may_ask=asyncio.Event(),
            fail=self.troubles.append,
            epoch=1,
        )
        self.shared.may_ask.set()

    def new_life(self) -> PartitionProcessor:
        """Return a processor that has not begun."""
        self.lives.append(PartitionProcessor(self.shared, PLACE, self.ends))
        return self.lives[-1]

    def life(self) -> PartitionProcessor:
        """Return a processor that has begun."""
        processor = self.new_life()
        processor.begin()
        return processor

    @asynccontextmanager
    async def living(self) -> AsyncGenerator[PartitionProcessor]:
        processor = self.life()
        try:
            yield processor
        finally:
            await processor.stop()


async def take(life: PartitionProcessor, log: MemoryLog, *offsets: int, **fields: Any) -> None:
    """Put a prompt at each offset, and let the processor read it."""
    for offset in offsets:
        await life.take(log.put(offset, **fields))


def at(log: MemoryLog) -> tuple[int, set[int]]:
    """Return the committed offset and the offsets answered behind it."""
    assert log.position is not None
    return log.position.offset, set(log.note.answered)


@pytest.fixture
def memory_log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    """Return the log that all processors of a test share."""
    log = MemoryLog()

    async def committed(
        settings: LogSettings, group_id: str, places: list[FullPlace]
    ) -> dict[FullPlace, CommittedOffset]:
        assert isinstance(settings, LogSettings) and (group_id, places) == (GROUP, [PLACE])
        return {} if log.position is None else {PLACE: log.position}

    async def replay(*arguments: Any, live: bool = False) -> int:
        settings, codec, hub, partition, offset, client_id = arguments
        assert isinstance(settings, LogSettings) and isinstance(codec, Codec) and client_id
        log.replayed.append((partition, offset))
        log.before_replay()
        while live or log.frames[offset:]:
            for frame in log.frames[offset:]:
                hub.apply(frame, asyncio.get_running_loop().time())
                offset += 1
            await pass_time(0.01)
        return max(int(offset), log.tokens_end, len(log.frames))

    monkeypatch.setattr(
        partition_processor, "Transactions", type("T", (MemoryTransactions,), {"log": log})
    )
    monkeypatch.setattr(
        partition_processor, "PromptLogReader", type("P", (MemoryPast,), {"log": log})
    )
    monkeypatch.setattr(partition_processor, "committed_offsets", committed)
    monkeypatch.setattr(partition_processor, "replay", replay)
    return log
