"""Batches end to end on a real broker, with the `openai` package.

A stand-in answers in place of the bridge: `tests/e2e/bridge/test_batches.py` has the real one.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from schemas.errors import RecordTooLarge
from schemas.log.clock import wall_ms
from schemas.log.transactions import OutgoingRecord, Transactions
from schemas.records import Batch
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from streams.gateway.batches import batch_run, batch_runner, shapes, turns
from streams.gateway.log.objects import ObjectLog
from streams.gateway.objects.table import key_of
from tests.streams.gateway.batches.samples import file_of, line
from tests.streams.gateway.batches.stand_in import CODEC, answered, standing_in
from tests.streams.gateway.indexing.running import KEYS, gateway
from tests.waiting import until

pytestmark = pytest.mark.kafka
CHAT: Any = "/v1/chat/completions"
FAR = "context_length_exceeded"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small batch is sent and written piece by piece."""
    monkeypatch.setattr(batch_runner, "CHUNK", 10)
    monkeypatch.setattr(turns, "WAITING_MAX", 40)
    monkeypatch.setattr(batch_run, "WRITE_S", 0.05)


async def begun(ai: openai.AsyncOpenAI, data: bytes, **wishes: Any) -> Any:
    file = await ai.files.create(file=("calls.jsonl", data), purpose="batch")
    return await ai.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **wishes
    )


async def ended(ai: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def has_ended() -> bool:
        batch = await ai.batches.retrieve(batch_id)
        return batch.status in ("failed", "completed", "expired", "cancelled")

    await until(has_ended)
    return await ai.batches.retrieve(batch_id)


async def read(ai: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = (await ai.files.content(file_id)).content
    return [json.loads(text) for text in content.splitlines()]


def by_id(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "a line is there twice"
    return found


def calls(count: int) -> bytes:
    return file_of(*(line(f"c{number}") for number in range(count)))


async def test_every_line_is_answered_once(kafka: LogSettings) -> None:
    """`/v1/batches`, files in and out."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][0]["content"] == "Of c3?":
            return {"error_code": FAR, "error_message": "too long"}
        return answered(body)

    async with gateway(kafka, "g1") as one, one.ai() as ai, standing_in(kafka, reply) as bridge:
        expiry: Any = {"anchor": "created_at", "seconds": 3_600}
        made = await begun(ai, calls(123), metadata={"a": "b"}, output_expires_after=expiry)
        assert made.status == "validating"
        batch = await ended(ai, made.id)
        assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"a": "b"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (123, 122, 1)
        assert batch.usage.total_tokens == 122 * 5
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        results = by_id(await read(ai, batch.output_file_id))
        assert results.keys() == {f"c{number}" for number in range(123)} - {"c3"}
        said = results["c7"]["response"]
        assert (said["status_code"], said["body"]) == (200, {"echo": "Of c7?"})
        (wrong,) = await read(ai, batch.error_file_id)
        assert wrong["custom_id"] == "c3" and wrong["response"]["status_code"] == 400
        assert wrong["response"]["body"]["error"]["code"] == FAR
        assert set(bridge.asked.values()) == {1} and len(bridge.asked) == 123
        assert {key.split("/")[1] for key in bridge.asked} == {made.id}
        file = await ai.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{made.id}_output.jsonl")
        assert file.expires_at is not None and file.expires_at == file.created_at + 3_600
        listed = [each.id async for each in ai.files.list(purpose="batch_output")]
        assert {batch.output_file_id, batch.error_file_id} <= set(listed)
        assert (await ai.batches.list(limit=1)).data[0].id == made.id


async def test_one_tenants_batches_leave_turns_to_another(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen batches that got no answers kept another's one line waiting (found 28)."""
    monkeypatch.setattr(turns, "CARRIED_MAX", 2)

    def reply(body: dict[str, Any]) -> dict[str, Any] | None:
        return None if "bob" in body["messages"][0]["content"] else answered(body)

    async with gateway(kafka, "g1") as one, standing_in(kafka, reply) as bridge:
        async with one.ai(KEYS[0]) as bob, one.ai(KEYS[1]) as alice:
            lines = file_of(*(line(f"bob{number}") for number in range(60)))
            bobs = [(await begun(bob, lines)).id for _ in range(3)]
            await until(lambda: len(bridge.asked) == 40)
            batch = await ended(alice, (await begun(alice, calls(7))).id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 7)
            assert len(bridge.asked) <= 40 + 7 + 20, "what bob has ahead is bounded"
            for name in bobs:
                await bob.batches.cancel(name)
                assert (await ended(bob, name)).status == "cancelled"


async def test_answers_to_a_batch_that_has_left_its_place_count(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bob's batch leaves its place to Alice's while its first lines are unanswered."""
    monkeypatch.setattr(turns, "CARRIED_MAX", 1)
    monkeypatch.setattr(turns, "TURN_LINES", 10)
    async with gateway(kafka, "g1") as one, standing_in(kafka) as bridge:
        async with one.ai(KEYS[0]) as bob, one.ai(KEYS[1]) as alice:
            bridge.may_answer.clear()
            bobs = await begun(bob, calls(60))
            await until(lambda: len(bridge.asked) == 40)
            alices = await begun(alice, calls(7))
            await until(lambda: any(alices.id in key for key in bridge.asked))
            bridge.may_answer.set()
            for ai, made, count in ((alice, alices, 7), (bob, bobs, 60)):
                batch = await ended(ai, made.id)
                assert (batch.status, batch.request_counts.completed) == ("completed", count)
        assert set(bridge.asked.values()) == {1}


async def test_the_next_gateway_waits_for_lines_of_a_batch_without_a_place(
    kafka_with: Callable[..., Awaitable[LogSettings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers were dropped, and it ended after 24 h (review of finding 28)."""
    monkeypatch.setattr(turns, "CARRIED_MAX", 1)
    monkeypatch.setattr(turns, "TURN_LINES", 10)
    kafka = await kafka_with(gateway_partitions=2)
    async with (
        gateway(kafka, "g2") as two,
        gateway(kafka, "g1") as one,
        standing_in(kafka) as bridge,
        two.ai(KEYS[0]) as bob,
        two.ai(KEYS[1]) as alice,
    ):
        bridge.may_answer.clear()
        bobs = await begun(bob, calls(60))
        await until(lambda: len(bridge.asked) == 40)
        alices = await begun(alice, calls(7))
        await until(lambda: any(alices.id in key for key in bridge.asked))
        await one.die()
        bridge.may_answer.set()
        for ai, made, count in ((alice, alices, 7), (bob, bobs, 60)):
            batch = await ended(ai, made.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", count)
        assert set(bridge.asked.values()) == {1}


async def test_what_is_wrong_with_a_file_ends_its_batch(kafka: LogSettings) -> None:
    """Nothing of it is asked."""
    async with gateway(kafka, "g1") as one, one.ai() as ai, standing_in(kafka) as bridge:
        made = await begun(ai, file_of(line("a"), b"{", line("a")))
        batch = await ended(ai, made.id)
        assert batch.status == "failed" and batch.failed_at
        told = [(each.line, each.code) for each in batch.errors.data]
        assert told == [(2, "invalid_json_line"), (3, "duplicate_custom_id")]
        assert batch.output_file_id is None and not bridge.asked


async def test_the_next_gateway_goes_on(
    kafka_with: Callable[..., Awaitable[LogSettings]],
) -> None:
    """No line is lost or doubled, neither on the log nor in the files; the deleted input stays
    until then."""
    kafka = await kafka_with(gateway_partitions=3)
    async with (
        gateway(kafka, "g3") as last,
        gateway(kafka, "g2") as second,
        gateway(kafka, "g1") as first,
        last.ai() as ai,
        standing_in(kafka) as bridge,
    ):
        async with first.ai() as caller:
            made = await begun(caller, calls(1_500))
            await caller.files.delete(made.input_file_id)
        for one in (first, second):
            before = bridge.answered
            await until(lambda before=before: bridge.answered > before + 150)
            await one.die()
        batch = await ended(ai, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 1_500)
        results = by_id(await read(ai, batch.output_file_id))
        assert results.keys() == {f"c{number}" for number in range(1_500)}
        assert set(bridge.asked.values()) == {1} and len(bridge.asked) == 1_500
        with pytest.raises(openai.NotFoundError):
            await ai.files.retrieve(made.input_file_id)


async def test_a_cancelled_batch_keeps_what_it_has(kafka: LogSettings) -> None:
    """And asks no more; lines without an answer are told as such."""

    def some(body: dict[str, Any]) -> dict[str, Any] | None:
        number = int(body["messages"][0]["content"][4:-1])
        return answered(body) if number < 12 else None

    async with gateway(kafka, "g1") as one, one.ai() as ai, standing_in(kafka, some) as bridge:
        made = await begun(ai, calls(200))
        await until(lambda: bridge.answered == 12 and len(bridge.asked) >= 50)
        cancelling = await ai.batches.cancel(made.id)
        assert cancelling.status in ("cancelling", "cancelled")
        batch = await ended(ai, made.id)
        assert batch.status == "cancelled" and batch.cancelled_at
        results = by_id(await read(ai, batch.output_file_id))
        wrong = by_id(await read(ai, batch.error_file_id))
        assert results.keys() <= {f"c{number}" for number in range(12)}
        assert results.keys() | wrong.keys() == {f"c{number}" for number in range(200)}
        assert not results.keys() & wrong.keys()
        assert {each["error"]["code"] for each in wrong.values()} == {"batch_cancelled"}
        assert len(bridge.asked) == 50, "not far ahead of the answers"


async def test_what_is_not_answered_in_time_has_expired(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(kafka, "g1") as one, one.ai() as ai, standing_in(kafka, lambda body: None):
        made = await begun(ai, calls(30))

        async def is_carried() -> bool:
            return bool((await ai.batches.retrieve(made.id)).status == "in_progress")

        await until(is_carried)
        late_ms = 2 * shapes.WINDOWS_MS["24h"]
        monkeypatch.setattr(batch_runner, "wall_ms", lambda: wall_ms() + late_ms)
        batch = await ended(ai, made.id)
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        wrong = by_id(await read(ai, batch.error_file_id))
        assert len(wrong) == 30
        assert {each["error"]["code"] for each in wrong.values()} == {"batch_expired"}


async def test_the_next_gateway_reads_what_was_committed_first(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its table was late: it goes on from the last commit, not from what it knew."""
    is_late, may_read = asyncio.Event(), asyncio.Event()
    fold, drop = ObjectLog._fold, ObjectLog.drop

    async def late_fold(self: ObjectLog, *args: Any) -> None:
        if self._client_id.startswith("g2") and is_late.is_set():
            await may_read.wait()
        await fold(self, *args)

    async def noted_drop(self: ObjectLog, *keys: str) -> None:
        if self._client_id.startswith("g2") and batch_runner.FENCE in keys:
            may_read.set()
        await drop(self, *keys)

    monkeypatch.setattr(ObjectLog, "_fold", late_fold)
    monkeypatch.setattr(ObjectLog, "drop", noted_drop)
    async with gateway(kafka, "g2") as two, two.ai() as ai, standing_in(kafka) as bridge:
        async with gateway(kafka, "g1") as one:
            async with one.ai() as caller:
                made = await begun(caller, calls(1_000))
            await until(lambda: bridge.answered > 50)
            is_late.set()
            await until(lambda: bridge.answered > 200)
            await one.die()
        batch = await ended(ai, made.id)
        assert batch.request_counts.completed == 1_000
        assert len(by_id(await read(ai, batch.output_file_id))) == 1_000
        assert set(bridge.asked.values()) == {1}


async def test_what_was_never_committed_is_not_there(kafka: LogSettings) -> None:
    """A transaction that is given up leaves nothing in what callers see."""
    lost = Batch(
        batch_id="batch_lost",
        tenant="",
        input_file_id="file-1",
        endpoint=CHAT,
        created_ms=1,
        expires_ms=2**40,
    )
    writer, topic = Transactions(kafka, "another"), kafka.topic_prefix + "objects"
    async with gateway(kafka, "g1", api_keys=()) as one, one.ai() as ai:
        await writer.start()
        try:
            too_large = bytes(RECORD_BYTES_MAX + 1)
            values = (CODEC.encode(lost), key_of(lost).encode()), (too_large, b"/x")
            with pytest.raises(RecordTooLarge):
                await writer.commit(
                    [
                        OutgoingRecord(topic=topic, partition=0, key=key, value=v)
                        for v, key in values
                    ]
                )
        finally:
            await writer.stop()
        await ai.files.create(file=("a.txt", b"a"), purpose="user_data")  # is read behind it
        assert [each.id async for each in ai.batches.list()] == []


async def test_of_two_that_think_they_are_first_one_writes(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that slept wakes up fenced; whoever began last goes on from what is committed."""
    monkeypatch.setattr("streams.gateway.log.backend.LogBackend.is_first", lambda self: True)
    async with (
        gateway(kafka, "g1") as one,
        gateway(kafka, "g2"),
        one.ai() as ai,
        standing_in(kafka) as bridge,
    ):
        made = await begun(ai, calls(400))
        batch = await ended(ai, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 400)
        assert len(by_id(await read(ai, batch.output_file_id))) == 400
        assert set(bridge.asked.values()) == {1} and len(bridge.asked) == 400
