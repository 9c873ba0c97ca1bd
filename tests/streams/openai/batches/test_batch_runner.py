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
from schemas.records import Batch
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.transactions import OutgoingRecord, Transactions
from streams.openai.batches import batch_run, batch_runner, shapes, turns
from streams.openai.objects.log import ObjectLog
from streams.openai.objects.table import key_of
from tests.streams.gateway.batch_samples import file_of, line
from tests.streams.openai.batches.stand_in import CODEC, answered, standing_in
from tests.streams.openai.indexing.kafka_gateway import KEYS, gateway
from tests.waits import until

pytestmark = pytest.mark.kafka
CHAT: Any = "/v1/chat/completions"
FAR = "context_length_exceeded"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small batch is sent and written piece by piece."""
    monkeypatch.setattr(batch_runner, "CHUNK", 10)
    monkeypatch.setattr(turns, "WAITING_MAX", 40)
    monkeypatch.setattr(batch_run, "WRITE_S", 0.05)


async def submit_batch(ai: openai.AsyncOpenAI, data: bytes, **wishes: Any) -> Any:
    file = await ai.files.create(file=("calls.jsonl", data), purpose="batch")
    return await ai.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **wishes
    )


async def wait_for_end(ai: openai.AsyncOpenAI, batch_id: str) -> Any:
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
    by_custom_id = {result["custom_id"]: result for result in lines}
    assert len(by_custom_id) == len(lines), "a line is there twice"
    return by_custom_id


def calls(count: int) -> bytes:
    return file_of(*(line(f"c{number}") for number in range(count)))


async def test_batch_runner_answers_each_line_once(kafka: LogSettings) -> None:
    """The `openai` client uses `/v1/batches`, with files for input and output."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][0]["content"] == "Of c3?":
            return {"error_code": FAR, "error_message": "too long"}
        return answered(body)

    async with gateway(kafka, "g1") as g1, g1.ai() as ai, standing_in(kafka, reply) as bridge:
        expiry: Any = {"anchor": "created_at", "seconds": 3_600}
        new_batch = await submit_batch(
            ai, calls(123), metadata={"a": "b"}, output_expires_after=expiry
        )
        assert new_batch.status == "validating"
        batch = await wait_for_end(ai, new_batch.id)
        assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"a": "b"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (123, 122, 1)
        assert batch.usage.total_tokens == 122 * 5
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        results = by_id(await read(ai, batch.output_file_id))
        assert results.keys() == {f"c{number}" for number in range(123)} - {"c3"}
        response = results["c7"]["response"]
        assert (response["status_code"], response["body"]) == (200, {"echo": "Of c7?"})
        (wrong,) = await read(ai, batch.error_file_id)
        assert wrong["custom_id"] == "c3" and wrong["response"]["status_code"] == 400
        assert wrong["response"]["body"]["error"]["code"] == FAR
        assert set(bridge.prompt_counts.values()) == {1} and len(bridge.prompt_counts) == 123
        assert {key.split("/")[1] for key in bridge.prompt_counts} == {new_batch.id}
        file = await ai.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{new_batch.id}_output.jsonl")
        assert file.expires_at is not None and file.expires_at == file.created_at + 3_600
        listed = [file.id async for file in ai.files.list(purpose="batch_output")]
        assert {batch.output_file_id, batch.error_file_id} <= set(listed)
        assert (await ai.batches.list(limit=1)).data[0].id == new_batch.id


async def test_batch_runner_shares_turns_between_tenants(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many batches that get no answers do not keep another tenant's single line waiting."""
    monkeypatch.setattr(turns, "CARRIED_MAX", 2)

    def reply(body: dict[str, Any]) -> dict[str, Any] | None:
        return None if "bob" in body["messages"][0]["content"] else answered(body)

    async with gateway(kafka, "g1") as g1, standing_in(kafka, reply) as bridge:
        async with g1.ai(KEYS[0]) as bob, g1.ai(KEYS[1]) as alice:
            lines = file_of(*(line(f"bob{number}") for number in range(60)))
            bobs = [(await submit_batch(bob, lines)).id for _ in range(3)]
            await until(lambda: len(bridge.prompt_counts) == 40)
            batch = await wait_for_end(alice, (await submit_batch(alice, calls(7))).id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 7)
            assert len(bridge.prompt_counts) <= 40 + 7 + 20, "what bob has ahead is bounded"
            for name in bobs:
                await bob.batches.cancel(name)
                assert (await wait_for_end(bob, name)).status == "cancelled"


async def test_batch_runner_counts_answers_to_batch_that_left_slot(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bob's batch leaves its slot to Alice's while its first lines are unanswered."""
    monkeypatch.setattr(turns, "CARRIED_MAX", 1)
    monkeypatch.setattr(turns, "TURN_LINES", 10)
    async with gateway(kafka, "g1") as g1, standing_in(kafka) as bridge:
        async with g1.ai(KEYS[0]) as bob, g1.ai(KEYS[1]) as alice:
            bridge.may_answer.clear()
            bobs = await submit_batch(bob, calls(60))
            await until(lambda: len(bridge.prompt_counts) == 40)
            alices = await submit_batch(alice, calls(7))
            await until(lambda: any(alices.id in key for key in bridge.prompt_counts))
            bridge.may_answer.set()
            for ai, new_batch, count in ((alice, alices, 7), (bob, bobs, 60)):
                batch = await wait_for_end(ai, new_batch.id)
                assert (batch.status, batch.request_counts.completed) == ("completed", count)
        assert set(bridge.prompt_counts.values()) == {1}


async def test_next_gateway_waits_for_lines_of_batch_without_slot(
    kafka_with: Callable[..., Awaitable[LogSettings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped answers would let the batch end only after 24 hours."""
    monkeypatch.setattr(turns, "CARRIED_MAX", 1)
    monkeypatch.setattr(turns, "TURN_LINES", 10)
    kafka = await kafka_with(gateway_partitions=2)
    async with (
        gateway(kafka, "g2") as g2,
        gateway(kafka, "g1") as g1,
        standing_in(kafka) as bridge,
        g2.ai(KEYS[0]) as bob,
        g2.ai(KEYS[1]) as alice,
    ):
        bridge.may_answer.clear()
        bobs = await submit_batch(bob, calls(60))
        await until(lambda: len(bridge.prompt_counts) == 40)
        alices = await submit_batch(alice, calls(7))
        await until(lambda: any(alices.id in key for key in bridge.prompt_counts))
        await g1.die()
        bridge.may_answer.set()
        for ai, new_batch, count in ((alice, alices, 7), (bob, bobs, 60)):
            batch = await wait_for_end(ai, new_batch.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", count)
        assert set(bridge.prompt_counts.values()) == {1}


async def test_batch_runner_fails_batch_with_file_errors(kafka: LogSettings) -> None:
    """No line of the file becomes a prompt."""
    async with gateway(kafka, "g1") as g1, g1.ai() as ai, standing_in(kafka) as bridge:
        new_batch = await submit_batch(ai, file_of(line("a"), b"{", line("a")))
        batch = await wait_for_end(ai, new_batch.id)
        assert batch.status == "failed" and batch.failed_at
        errors = [(error.line, error.code) for error in batch.errors.data]
        assert errors == [(2, "invalid_json_line"), (3, "duplicate_custom_id")]
        assert batch.output_file_id is None and not bridge.prompt_counts


async def test_next_gateway_resumes_batch_without_loss_or_duplicates(
    kafka_with: Callable[..., Awaitable[LogSettings]],
) -> None:
    """The deleted input file stays readable until the batch ends."""
    kafka = await kafka_with(gateway_partitions=3)
    async with (
        gateway(kafka, "g3") as last,
        gateway(kafka, "g2") as second,
        gateway(kafka, "g1") as first,
        last.ai() as ai,
        standing_in(kafka) as bridge,
    ):
        async with first.ai() as caller:
            new_batch = await submit_batch(caller, calls(1_500))
            await caller.files.delete(new_batch.input_file_id)
        for predecessor in (first, second):
            before = bridge.answered
            await until(lambda before=before: bridge.answered > before + 150)
            await predecessor.die()
        batch = await wait_for_end(ai, new_batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 1_500)
        results = by_id(await read(ai, batch.output_file_id))
        assert results.keys() == {f"c{number}" for number in range(1_500)}
        assert set(bridge.prompt_counts.values()) == {1} and len(bridge.prompt_counts) == 1_500
        with pytest.raises(openai.NotFoundError):
            await ai.files.retrieve(new_batch.input_file_id)


async def test_cancelled_batch_keeps_answers_it_has(kafka: LogSettings) -> None:
    """It sends no more prompts, and lines without an answer become errors."""

    def some(body: dict[str, Any]) -> dict[str, Any] | None:
        number = int(body["messages"][0]["content"][4:-1])
        return answered(body) if number < 12 else None

    async with gateway(kafka, "g1") as g1, g1.ai() as ai, standing_in(kafka, some) as bridge:
        new_batch = await submit_batch(ai, calls(200))
        await until(lambda: bridge.answered == 12 and len(bridge.prompt_counts) >= 50)
        cancelling = await ai.batches.cancel(new_batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        batch = await wait_for_end(ai, new_batch.id)
        assert batch.status == "cancelled" and batch.cancelled_at
        results = by_id(await read(ai, batch.output_file_id))
        wrong = by_id(await read(ai, batch.error_file_id))
        assert results.keys() <= {f"c{number}" for number in range(12)}
        assert results.keys() | wrong.keys() == {f"c{number}" for number in range(200)}
        assert not results.keys() & wrong.keys()
        assert {result["error"]["code"] for result in wrong.values()} == {"batch_cancelled"}
        assert len(bridge.prompt_counts) == 50, "not far ahead of the answers"


async def test_batch_runner_expires_unanswered_lines(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(kafka, "g1") as g1, g1.ai() as ai, standing_in(kafka, lambda body: None):
        new_batch = await submit_batch(ai, calls(30))

        async def is_carried() -> bool:
            return bool((await ai.batches.retrieve(new_batch.id)).status == "in_progress")

        await until(is_carried)
        late_ms = 2 * shapes.WINDOWS_MS["24h"]
        monkeypatch.setattr(batch_runner, "wall_ms", lambda: wall_ms() + late_ms)
        batch = await wait_for_end(ai, new_batch.id)
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        wrong = by_id(await read(ai, batch.error_file_id))
        assert len(wrong) == 30
        assert {result["error"]["code"] for result in wrong.values()} == {"batch_expired"}


async def test_next_gateway_reads_committed_progress_before_takeover(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table was late: it resumes from the last commit, not from what it knew."""
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
    async with gateway(kafka, "g2") as g2, g2.ai() as ai, standing_in(kafka) as bridge:
        async with gateway(kafka, "g1") as g1:
            async with g1.ai() as caller:
                new_batch = await submit_batch(caller, calls(1_000))
            await until(lambda: bridge.answered > 50)
            is_late.set()
            await until(lambda: bridge.answered > 200)
            await g1.die()
        await until(may_read.is_set)  # when the lease has ended; until then it refuses calls
        batch = await wait_for_end(ai, new_batch.id)
        assert batch.request_counts.completed == 1_000
        assert len(by_id(await read(ai, batch.output_file_id))) == 1_000
        assert set(bridge.prompt_counts.values()) == {1}


async def test_aborted_transaction_shows_no_batch(kafka: LogSettings) -> None:
    """An aborted transaction leaves nothing in what callers see."""
    aborted_batch = Batch(
        batch_id="batch_lost",
        tenant="",
        input_file_id="file-1",
        endpoint=CHAT,
        created_ms=1,
        expires_ms=2**40,
    )
    writer, topic = Transactions(kafka, "another"), kafka.topic_prefix + "objects"
    async with gateway(kafka, "g1", api_keys=()) as g1, g1.ai() as ai:
        await writer.start()
        try:
            too_large = bytes(RECORD_BYTES_MAX + 1)
            values = (
                (CODEC.encode(aborted_batch), key_of(aborted_batch).encode()),
                (too_large, b"/x"),
            )
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
        assert [listed_batch.id async for listed_batch in ai.batches.list()] == []


async def test_batch_runner_fences_second_leader(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that slept wakes up fenced; the latest one resumes from what is committed."""
    monkeypatch.setattr("streams.calls.log.member.CallMember.is_first", lambda self: True)
    async with (
        gateway(kafka, "g1") as g1,
        gateway(kafka, "g2"),
        g1.ai() as ai,
        standing_in(kafka) as bridge,
    ):
        new_batch = await submit_batch(ai, calls(400))
        batch = await wait_for_end(ai, new_batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 400)
        assert len(by_id(await read(ai, batch.output_file_id))) == 400
        assert set(bridge.prompt_counts.values()) == {1} and len(bridge.prompt_counts) == 400
