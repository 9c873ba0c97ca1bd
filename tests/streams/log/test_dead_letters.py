"""Dead letters are read whole, and each is sent again once, wherever that ends."""

from collections.abc import Sequence
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, Fenced, RecordError
from schemas.settings import LogSettings
from streams.log import dead_letters
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter
from streams.log.dead_letters import (
    DeadLetter,
    LetterSelection,
    RetryCounts,
    count_retries,
    read_letters,
    retry,
    topics_with_letters,
)
from streams.log.transactions import OutgoingRecord, Transactions
from tests.streams.log.transaction_wait import settle

pytestmark = pytest.mark.kafka
PARTITIONS = (2, 1)  # of `prompts` in tests, and of its dead letters
EVERY = LetterSelection()


async def prompts(kafka: LogSettings) -> list[Any]:
    await settle(kafka, f"dlq-{kafka.topic_prefix}prompts")
    reader = AssignedReader(kafka, "prompts", range(2), client_id="look", committed_only=True)
    async with reader.reading("earliest"):
        return await reader.read_to_end()


async def letters(kafka: LogSettings) -> list[DeadLetter]:
    await settle(kafka, f"dlq-{kafka.topic_prefix}prompts")
    return [letter async for letter in read_letters(kafka, f"{kafka.topic_prefix}prompts", 1)]


async def bury_some(kafka: LogSettings, values: Sequence[bytes], partition: int = 1) -> None:
    """Write values to `prompts`, and dead-letter them from there."""
    async with LogProducer(kafka, Codec(), durable=True, client_id="test") as producer:
        for value in values:
            ack = await producer.send_raw(
                f"{kafka.topic_prefix}prompts",
                value,
                key=b"k-" + value,
                partition=partition,
                headers=[("trace", b"t"), ("trace", b"u")],
            )
            await ack
        for record in await prompts(kafka):
            await send_dead_letter(
                producer, record, RecordError(f"no prompt: {record.value.decode()}")
            )


async def run(kafka: LogSettings, selection: LetterSelection = EVERY) -> RetryCounts:
    counts = RetryCounts()
    await retry(kafka, f"{kafka.topic_prefix}prompts", PARTITIONS, selection, counts)
    return counts


async def test_retry_resends_dead_letter_unchanged_once(kafka: LogSettings) -> None:
    await bury_some(kafka, [b"one", b"two"])
    first, second = await letters(kafka)
    counts = {f"{kafka.topic_prefix}{name}": 1 for name in ("prompts", "requests")}
    assert await topics_with_letters(kafka, counts) == {f"{kafka.topic_prefix}prompts"}, (
        "others are not read"
    )
    assert first.key == b"k-one" and first.error == "RecordError: no prompt: one"
    assert first.name == f"{kafka.topic_prefix}prompts/0/0" and first.origin == "1/0"
    assert not first.is_retried and not second.is_retried

    assert await run(kafka, LetterSelection(places=frozenset({second.place}))) == RetryCounts(
        sent=1
    )
    *_, resent_prompt = await prompts(kafka)
    assert (resent_prompt.partition, resent_prompt.key, resent_prompt.value) == (
        1,
        b"k-two",
        b"two",
    )
    assert resent_prompt.headers == (("trace", b"t"), ("trace", b"u"), ("x-dlq-sent-again", b"1"))
    assert [letter.is_retried for letter in await letters(kafka)] == [False, True]
    assert await run(kafka) == RetryCounts(sent=1, already=1)
    assert [prompt.value for prompt in await prompts(kafka)] == [b"one", b"two", b"two", b"one"]


async def test_retry_counts_repeatedly_resent_letters(kafka: LogSettings) -> None:
    """A returning letter is a new one, so only its header shows that it was resent before."""
    await bury_some(kafka, [b"one"])
    assert await run(kafka) == RetryCounts(sent=1)
    async with LogProducer(kafka, Codec(), durable=True, client_id="test") as producer:
        for _ in range(2):
            *_, record = await prompts(kafka)
            await send_dead_letter(producer, record, RecordError("no prompt still"))
            *_, letter = await letters(kafka)
            selection = LetterSelection(places=frozenset({letter.place}))
            assert await run(kafka, selection) == RetryCounts(sent=1, repeatedly=1)
    *_, record = await prompts(kafka)
    assert record.headers[-1] == ("x-dlq-sent-again", b"3")


async def test_count_retries_sends_nothing(kafka: LogSettings) -> None:
    await bury_some(kafka, [b"one"])
    counts = RetryCounts()
    await count_retries(kafka, f"{kafka.topic_prefix}prompts", PARTITIONS, EVERY, counts)
    assert counts == RetryCounts(sent=1)
    assert len(await prompts(kafka)) == 1 and not (await letters(kafka))[0].is_retried


@pytest.mark.parametrize("is_committed", [False, True])
async def test_interrupted_retry_resends_nothing_twice(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """The broker may have committed records although the client got an error."""
    await bury_some(kafka, [b"one", b"two", b"three"])
    monkeypatch.setattr(dead_letters, "_COMMIT_RECORDS", 2)
    commit = Transactions.commit
    commit_outcomes = [True, False]

    async def breaking(
        self: Transactions, sends: Sequence[OutgoingRecord], *rest: Any
    ) -> list[int]:
        if commit_outcomes.pop(0):
            return await commit(self, sends, *rest)
        if is_committed:
            await commit(self, sends, *rest)
        raise BrokerUnavailable("gone")

    counts = RetryCounts()
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "commit", breaking)
        with pytest.raises(BrokerUnavailable):
            await retry(kafka, f"{kafka.topic_prefix}prompts", PARTITIONS, EVERY, counts)
    assert counts == RetryCounts(sent=1)
    already = 1 + is_committed
    assert await run(kafka) == RetryCounts(sent=3 - already, already=already)
    values = sorted(prompt.value for prompt in await prompts(kafka))
    assert values == sorted([b"one", b"two", b"three"] * 2)


async def test_second_retry_fences_first(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands read the same letters before either has sent any."""
    await bury_some(kafka, [b"one"])
    commit = Transactions.commit
    rival_counts: list[RetryCounts] = []

    async def overtaken(
        self: Transactions, sends: Sequence[OutgoingRecord], *rest: Any
    ) -> list[int]:
        if not rival_counts:
            rival_counts.append(RetryCounts())
            topic = f"{kafka.topic_prefix}prompts"
            await retry(kafka, topic, PARTITIONS, EVERY, rival_counts[0])
        return await commit(self, sends, *rest)

    monkeypatch.setattr(Transactions, "commit", overtaken)
    with pytest.raises(Fenced):
        await run(kafka)
    assert rival_counts == [RetryCounts(sent=1)] and len(await prompts(kafka)) == 2


async def test_retry_skips_letters_without_value_or_origin(kafka: LogSettings) -> None:
    """Some values are too large for a dead letter; some letters have no valid origin."""
    dead = f"{kafka.topic_prefix}prompts.dlq"
    async with LogProducer(kafka, Codec(), durable=True, client_id="test") as producer:
        for value, partition in ((None, b"0"), (b"x", b"9"), (b"x", b"?")):
            headers = [("x-dlq-partition", partition)]
            await (await producer.send_raw(dead, value, key=b"", partition=0, headers=headers))
    assert await run(kafka) == RetryCounts(impossible=3)
    assert await prompts(kafka) == []


async def test_letter_selection_filters_by_time_and_error(kafka: LogSettings) -> None:
    await bury_some(kafka, [b"one", b"two"])
    first, second = await letters(kafka)
    assert first in LetterSelection(error="PROMPT: one") and second not in LetterSelection(
        error="prompt: one"
    )
    assert first not in LetterSelection(since_ms=first.at_ms + 1)
    assert first in LetterSelection(since_ms=first.at_ms) and first not in LetterSelection(
        before_ms=first.at_ms
    )
