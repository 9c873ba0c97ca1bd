"""Reads and retries dead letters: records on `<topic>.dlq` that could not be read or handled.

A retried letter stays on its topic, because the log is append-only; a mark behind it names it.
Record and mark are in one transaction, and one command at a time sends: nothing is sent twice,
even if a command is interrupted. `trivium dlq` calls this.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from schemas.codec import why_unreadable
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX, RETRIED, SENT_AGAIN
from streams.log.clients import AssignedReader
from streams.log.connecting import no_broker, query_client
from streams.log.transactions import OutgoingRecord, Transactions

_MARK, _TIMES = DEAD_LETTER_HEADERS + RETRIED, DEAD_LETTER_HEADERS + SENT_AGAIN
_COMMIT_RECORDS = 500
Place = tuple[str, int, int]  # full original topic; partition and offset on the dead-letter topic
_COMMIT_BYTES = 4_000_000
_TIMES_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter; `details` have its error and origin, by header names without prefix."""

    topic: str  # full name of the original topic
    partition: int  # on the dead-letter topic, as is `offset`
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    details: dict[str, str]
    is_retried: bool

    @property
    def place(self) -> Place:
        """Return where the letter is: original topic, dead-letter partition and offset."""
        return self.topic, self.partition, self.offset

    @property
    def name(self) -> str:
        """Return its name in `trivium dlq`."""
        return "/".join(map(str, self.place))

    @property
    def error(self) -> str:
        """Return its error's class and message in one line."""
        return (
            f"{self.details.get('error-class', 'unknown')}: {self.details.get('error-message', '')}"
        )

    @property
    def retry_count(self) -> int:
        """Return how often the record had been retried before it failed again."""
        text = self.details.get(SENT_AGAIN, "")
        return int(text) if text.isdecimal() and len(text) < _TIMES_DIGITS else 0

    @property
    def origin(self) -> str:
        """Return its original partition and offset; `?` for what its headers lack."""
        return f"{self.details.get('partition', '?')}/{self.details.get('offset', '?')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection:
    """Selects dead letters by the fields that are set; without any, all of them."""

    places: frozenset[Place] = frozenset()
    since_ms: int = 0
    before_ms: int = 1 << 62
    error: str = ""  # a part of the error, ignoring case

    def __contains__(self, letter: DeadLetter) -> bool:
        return (
            (not self.places or letter.place in self.places)
            and self.since_ms <= letter.at_ms < self.before_ms
            and self.error.lower() in letter.error.lower()
        )


@dataclass(slots=True)
class RetryCounts:
    """Counts of a retry of dead letters so far."""

    sent: int = 0
    already: int = 0  # retried by an earlier command
    repeatedly: int = 0  # of those sent: had been retried before, and failed again
    impossible: int = 0  # their values or their original partitions are lost


async def topics_with_letters(log: LogSettings, counts: Mapping[str, int]) -> set[str]:
    """Return the topics, by full name, whose dead-letter topics are not empty.

    `counts` has the number of partitions of each topic. Reading an empty topic takes half a second.
    """
    places = [
        TopicPartition(name + DEAD_LETTER_SUFFIX, number)
        for name, count in counts.items()
        for number in range(count)
    ]
    try:
        topics = {place.topic for place in places}
        async with query_client(log, committed_only=True, topics=topics) as client:
            first, end = await client.beginning_offsets(places), await client.end_offsets(places)
    except KafkaError as error:
        raise no_broker(log.bootstrap, error) from error
    nonempty_topics = {place.topic for place in places if first[place] < end[place]}
    return {name for name in counts if name + DEAD_LETTER_SUFFIX in nonempty_topics}


async def read_letters(
    log: LogSettings, topic: str, partitions: int
) -> AsyncGenerator[DeadLetter, None]:
    """Yield all letters of a topic, by its full name, as of now; each partition's in order.

    `partitions` is the number of partitions of its dead-letter topic. Marks come after their
    letters, so a first pass reads them. A caller that does not read to the end must close it.
    """
    reader = AssignedReader(
        replace(log, topic_prefix=""),
        topic + DEAD_LETTER_SUFFIX,
        range(partitions),
        client_id="trivium-dlq",
        committed_only=True,
    )
    async with reader.reading("nowhere"):
        first, ends = await reader.first_offsets(), await reader.end_offsets()
        retried = set[tuple[int, int]]()
        await reader.seek(first)
        async for batch in reader.until(ends):
            retried.update(
                (record.partition, at)
                for record in batch
                if (at := _marked_offset(record)) is not None
            )
        await reader.seek(first)
        async for batch in reader.until(ends):
            for record in batch:
                if record.offset < ends[record.partition] and _marked_offset(record) is None:
                    yield _letter(topic, record, (record.partition, record.offset) in retried)


def _marked_offset(record: ConsumerRecord) -> int | None:
    """Return the offset that a mark names; None for a letter."""
    value = dict(record.headers).get(_MARK, b"")
    return int(value) if value.isdigit() else None


def _letter(topic: str, record: ConsumerRecord, is_retried: bool) -> DeadLetter:
    details = {
        name.removeprefix(DEAD_LETTER_HEADERS): value.decode(errors="replace")
        for name, value in record.headers
        if name.startswith(DEAD_LETTER_HEADERS)
    }
    return DeadLetter(
        topic=topic,
        partition=record.partition,
        offset=record.offset,
        at_ms=record.timestamp,
        key=record.key,
        value=None if why_unreadable(record.value) else record.value,
        headers=tuple(
            header for header in record.headers if not header[0].startswith(DEAD_LETTER_HEADERS)
        ),
        details=details,
        is_retried=is_retried,
    )


async def retry(
    log: LogSettings,
    topic: str,
    partitions: tuple[int, int],
    selection: LetterSelection,
    counts: RetryCounts,
) -> None:
    """Send the selected letters to their topic again: same key, value, headers and partition, and
    one more header with the number of retries.

    `partitions` are the numbers of partitions of the topic and of its dead-letter topic. `counts`
    has what is committed, even if this raises. Raises Fenced if another command sends letters of
    the topic, and BrokerUnavailable, after which more letters may be committed; see their marks.
    """
    transactions = Transactions(log, f"dlq-{topic}")
    try:
        await transactions.start()  # voids what another command has not committed
        sends, size = list[OutgoingRecord](), 0
        async with aclosing(_select(log, topic, partitions, selection, counts)) as chosen:
            async for sending, mark in chosen:
                sends += sending, mark
                size += len(sending.value or b"")
                if len(sends) >= _COMMIT_RECORDS or size > _COMMIT_BYTES:
                    await transactions.commit(sends)
                    counts.sent += len(sends) // 2
                    sends, size = [], 0
        if sends:
            await transactions.commit(sends)
            counts.sent += len(sends) // 2
    finally:
        await transactions.stop()


async def count_retries(
    log: LogSettings,
    topic: str,
    partitions: tuple[int, int],
    selection: LetterSelection,
    counts: RetryCounts,
) -> None:
    """Count the letters that `retry` would send, without sending them."""
    async with aclosing(_select(log, topic, partitions, selection, counts)) as chosen:
        async for _ in chosen:
            counts.sent += 1


async def _select(
    log: LogSettings,
    topic: str,
    partitions: tuple[int, int],
    selection: LetterSelection,
    counts: RetryCounts,
) -> AsyncGenerator[tuple[OutgoingRecord, OutgoingRecord], None]:
    """Yield the records to send, each with its mark; count the letters that are not sent."""
    count, of_letters = partitions
    async with aclosing(read_letters(log, topic, of_letters)) as letters:
        async for letter in letters:
            if letter not in selection:
                continue
            if letter.is_retried:
                counts.already += 1
            elif (sending := _original(letter, count)) is None:
                counts.impossible += 1
            else:
                counts.repeatedly += letter.retry_count > 0
                yield sending, _mark(letter)


def _original(letter: DeadLetter, count: int) -> OutgoingRecord | None:
    """Return the original record; None if its value or its partition is lost."""
    partition = letter.details.get("partition", "")
    if letter.value is None or not partition.isdigit() or int(partition) >= count:
        return None
    return OutgoingRecord(
        topic=letter.topic,
        partition=int(partition),
        key=letter.key,
        value=letter.value,
        headers=(*letter.headers, (_TIMES, str(letter.retry_count + 1).encode())),
    )


def _mark(letter: DeadLetter) -> OutgoingRecord:
    return OutgoingRecord(
        topic=letter.topic + DEAD_LETTER_SUFFIX,
        partition=letter.partition,
        key=letter.key or b"",
        value=None,
        headers=((_MARK, str(letter.offset).encode()),),
    )
