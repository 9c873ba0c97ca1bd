"""Dead letters: records that nobody could read or answer, as they lie on `<topic>.dlq`.

A log forgets nothing, so one that was sent again stays where it is, and a mark behind it says so.
Record and mark are in one transaction, and one command at a time sends: nothing is sent twice,
wherever a command breaks off.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from schemas.codec import why_unreadable
from schemas.log.clients import AssignedReader
from schemas.log.connecting import no_broker, query_client
from schemas.log.transactions import OutgoingRecord, Transactions
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX, RETRIED, SENT_AGAIN

_MARK, _TIMES = DEAD_LETTER_HEADERS + RETRIED, DEAD_LETTER_HEADERS + SENT_AGAIN
_COMMIT_RECORDS = 500
Place = tuple[str, int, int]  # full topic that it was on; partition and offset where it lies now
_COMMIT_BYTES = 4_000_000
_TIMES_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter; `details` say why it is one, by header names without prefix."""

    topic: str  # full name of the topic that it was on
    partition: int  # where it lies now, as offset
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    details: dict[str, str]
    is_retried: bool

    @property
    def place(self) -> Place:
        """Return where the letter lies: topic, partition and offset."""
        return self.topic, self.partition, self.offset

    @property
    def name(self) -> str:
        """What `trivium dlq` calls it."""
        return "/".join(map(str, self.place))

    @property
    def error(self) -> str:
        """What went wrong, in a line."""
        return (
            f"{self.details.get('error-class', 'unknown')}: {self.details.get('error-message', '')}"
        )

    @property
    def retry_count(self) -> int:
        """Return how often the record was sent again before it came back."""
        text = self.details.get(SENT_AGAIN, "")
        return int(text) if text.isdecimal() and len(text) < _TIMES_DIGITS else 0

    @property
    def origin(self) -> str:
        """Where it was, as far as that was told."""
        return f"{self.details.get('partition', '?')}/{self.details.get('offset', '?')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection:
    """Selects dead letters: all of them where no field is set."""

    places: frozenset[Place] = frozenset()
    since_ms: int = 0
    before_ms: int = 1 << 62
    error: str = ""  # a part of what went wrong, in any case of letters

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
    already: int = 0  # by an earlier command
    repeatedly: int = 0  # of those sent: had been before, and came back
    impossible: int = 0  # only the origin was kept, or not even that


async def topics_with_letters(log: LogSettings, counts: Mapping[str, int]) -> set[str]:
    """Topics, by their full names, whose dead-letter topics are not empty; with the counts of their
    partitions. To read one that is empty takes half a second.
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
    """All letters of a topic, by its full name, as of now; those of a partition in order.

    `partitions` is the count of its dead-letter topic. Marks follow what they mark, so they are
    read before. Whoever does not read to the end closes it.
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
    """The offset that a mark names; None for a letter."""
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
    """Send what is wanted to its topic again: the same key, value and headers, on its partition,
    and in a header more how often that was done.

    `partitions` are the counts of the topic and of its dead-letter topic. `counts` counts what is
    committed, also where this raises: Fenced where another command sends letters of the topic
    meanwhile, and BrokerUnavailable, after which some more may be committed. The marks tell.
    """
    transactions = Transactions(log, f"dlq-{topic}")
    try:
        await transactions.start()  # what another command has not committed is void
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
    """Count what `retry` would do."""
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
    """What is sent, each with the mark that says so; the rest is counted."""
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
    """Return the original record; None where its value was not kept."""
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
