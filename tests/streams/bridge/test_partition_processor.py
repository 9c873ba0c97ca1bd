"""One partition of prompts from its beginning to its end, over a log in memory and on virtual time.

That each prompt gets one answer over a broker, whatever is killed, tests/e2e/bridge shows.
"""

import asyncio
import json
from typing import Any

import pytest

from schemas.codec import unreadable_value
from schemas.errors import (
    BrokerUnavailable,
    Fenced,
    LeaseError,
    QueueFull,
    RecordTooLarge,
    WorkerLost,
)
from streams.bridge import partition_processor, progress
from streams.bridge.progress import WINDOW
from tests.streams.bridge.memory_log import TOKENS, Bridge, MemoryLog, at, memory_log, take
from tests.streams.bridge.samples import pair
from tests.streams.gateway.samples import MODEL
from tests.virtual_time import virtual
from tests.waits import pass_time, until

__all__ = ["memory_log"]  # a fixture


@virtual
async def test_partition_processor_commits_answers_with_position(memory_log: MemoryLog) -> None:
    """The position is the first prompt without an answer."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await until(lambda: memory_log.commits == 1)
        assert memory_log.note.tokens == TOKENS, "before anything is asked"
        await take(life, memory_log, 0, 1, 2)
        for offset, position, behind in ((1, 0, {1}), (2, 0, {1, 2}), (0, 3, set())):
            bridge.asking.answer(offset)
            await until(lambda offset=offset: offset in memory_log.answers())
            assert at(memory_log) == (position, behind)
        await until(lambda: len(life._tasks) == 1)  # that commits; of prompts nothing is kept
    assert bridge.asking.submitted_offsets == [0, 1, 2] and not bridge.troubles


@virtual
async def test_partition_processor_fences_predecessor_and_resumes(memory_log: MemoryLog) -> None:
    """It listens to pending prompts before it resubmits them, and skips answered ones."""
    first, second = Bridge(memory_log), Bridge(memory_log)
    slept = first.life()
    await take(slept, memory_log, 0, 1, 2)
    first.asking.answer(1)
    await until(lambda: 1 in memory_log.answers())
    second.asking.process.tokens.positions = {5: 7}
    async with second.living() as life:
        await until(lambda: second.asking.submitted_offsets == [0, 2])
        assert second.asking.begun_offsets[:2] == [0, 2]
        assert set(memory_log.replayed) == set(TOKENS.items())
        assert memory_log.note.tokens == {5: 7, **TOKENS}
        first.asking.answer(0, "late")
        await until(lambda: bool(first.troubles))
        assert isinstance(first.troubles[0], Fenced) and 0 not in memory_log.answers()
        await take(life, memory_log, 3)
        for offset in (0, 2, 3):
            second.asking.answer(offset)
        await until(lambda: len(memory_log.answers()) == 4)
        assert at(memory_log) == (4, set())
        await take(life, memory_log, 4)
        second.asking.answer(4)
        await until(lambda: 4 in memory_log.answers())
        assert memory_log.note.tokens == {5: 7}, "all that others asked is answered"
        assert not second.troubles
    await slept.stop()


@virtual
async def test_partition_processor_advances_token_offset_without_output(
    memory_log: MemoryLog,
) -> None:
    """Otherwise bridges that are killed often would replay the whole log."""
    first, second = Bridge(memory_log), Bridge(memory_log)
    slept = first.life()
    await take(slept, memory_log, 0, 1, 2)
    await until(lambda: first.asking.submitted_offsets == [0, 1, 2])
    memory_log.tokens_end = 400
    second.asking.begins = {1}
    second.asking.process.tokens.positions = {5: 390}
    async with second.living():
        await until(lambda: second.asking.submitted_offsets == [0, 1, 2])
        second.asking.process.tokens.positions = {5: 450}  # where answers lie that began before
        for offset, since in ((0, 100), (1, 400)):
            second.asking.answer(offset)
            await until(lambda offset=offset: offset in memory_log.answers())
            assert memory_log.note.tokens == {3: since, 5: 390}
    await slept.stop()


@virtual
async def test_partition_processor_rereads_outcome_of_failed_tries(memory_log: MemoryLog) -> None:
    """The try after them may have an answer already."""
    first, second = Bridge(memory_log), Bridge(memory_log)
    async with first.living() as life:
        await take(life, memory_log, 0)
        await until(lambda: first.asking.submitted_offsets == [0])
    second.asking.early_errors[0] = WorkerLost("of the first try")
    async with second.living():
        await until(lambda: second.asking.submitted_offsets == [0])
        assert second.asking.begun_offsets == [0, 0]
        assert memory_log.replayed[:2] == [*TOKENS.items(), *TOKENS.items()]


@virtual
async def test_partition_processor_gives_embedding_calls_no_slot(memory_log: MemoryLog) -> None:
    """A successor restarts them: only the embedding pool knew of them."""
    call = {"body": {"model": "m", "input": "a"}, "endpoint": "/v1/embeddings"}
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        for offset in range(8):
            await take(life, memory_log, offset)
        await take(life, memory_log, 8, value=call)
        await until(lambda: 8 in bridge.asking.submitted_offsets)
    second = Bridge(memory_log)
    for _ in range(8):
        await second.shared.slots.of(MODEL).acquire()
    async with second.living():
        await pass_time(1)
        assert second.asking.begun_offsets == list(range(8))


@virtual
async def test_partition_processor_flushes_finished_answers(memory_log: MemoryLog) -> None:
    bridge = Bridge(memory_log)
    life = bridge.life()
    await take(life, memory_log, 0, 1)
    bridge.asking.answer(0)
    await until(lambda: 0 in memory_log.answers())
    bridge.asking.answer(1)
    await pass_time(0)
    await pass_time(0)
    await life.flush()
    await life.stop()
    assert sorted(memory_log.answers()) == [0, 1]
    await life.take(memory_log.put(2))
    assert 2 not in bridge.asking.submitted_offsets


@pytest.mark.parametrize("topic", ["rows.answers", "rows.dlq"])
@virtual
async def test_partition_processor_replaces_refused_answer_with_error(
    memory_log: MemoryLog, topic: str
) -> None:
    """The rest of the commit goes through; a prompt too large keeps only its origin."""
    memory_log.bytes_max[topic] = 2_000
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        value = {"text": "x" * (3_000 if topic == "rows.dlq" else 1), "metadata": {"a": 1}}
        await take(life, memory_log, 0, 1, 2, 3, value=value)
        await until(lambda: len(bridge.asking.submitted_offsets) == 4)
        for offset in range(4):
            if topic == "rows.answers":
                bridge.asking.answer(offset, "x" * (3_000 if offset == 1 else 1))
            elif offset == 1:
                bridge.asking.fail(offset, QueueFull("no room"))
            else:
                bridge.asking.answer(offset)
        await until(lambda: len(memory_log.answers()) == 4)
        await take(life, memory_log, 4)
        bridge.asking.answer(4)
        await until(lambda: 4 in memory_log.answers())
    codes = [memory_log.answers()[offset].error_code for offset in range(5)]
    assert [code is None for code in codes] == [True, False, True, True, True]
    assert codes[1] == ("record_too_large" if topic == "rows.answers" else "queue_full")
    (letter,) = memory_log.letters
    assert letter["x-dlq-offset"] == b"1" and letter["x-dlq-error-code"].decode() == codes[1]
    assert {
        outgoing.key for outgoing in memory_log.records if outgoing.topic == "rows.answers"
    } == {b"k"}
    assert not bridge.troubles and at(memory_log) == (5, set())


@virtual
async def test_partition_processor_writes_empty_answer_for_empty_prompt(
    memory_log: MemoryLog,
) -> None:
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0, value=b"")
        await until(lambda: at(memory_log)[0] == 1)
    (outgoing,) = memory_log.records
    assert (outgoing.topic, outgoing.key, outgoing.value) == ("rows.answers", b"k", None)
    assert (
        dict(outgoing.headers)["trivium-prompt-offset"] == b"0"
        and not bridge.asking.submitted_offsets
    )


@virtual
async def test_partition_processor_drops_metadata_from_refused_error(
    memory_log: MemoryLog,
) -> None:
    memory_log.bytes_max["rows.answers"] = 2_000
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await life.take(memory_log.put(0, {"text": "a", "metadata": {"a": "x" * 4_000}}))
        bridge.asking.answer(0, metadata=json.dumps({"a": "x" * 4_000}))
        await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].error_code == "record_too_large"
    assert memory_log.answers()[0].metadata is None and not bridge.troubles


@virtual
async def test_partition_processor_drops_key_from_refused_error(memory_log: MemoryLog) -> None:
    memory_log.bytes_max["rows.answers"] = 2_000
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0, key=b"k" * 3_000)
        bridge.asking.fail(0, QueueFull("no room"))
        await until(lambda: 0 in memory_log.answers())
    assert memory_log.answers()[0].error_code == "queue_full" and not bridge.troubles
    assert [
        outgoing.key for outgoing in memory_log.records if outgoing.topic == "rows.answers"
    ] == [b""]


@virtual
async def test_partition_processor_fails_when_no_error_form_fits(memory_log: MemoryLog) -> None:
    """Its topics do not take even the smallest error; the next processor tries again."""
    memory_log.bytes_max["rows.answers"] = 10
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        bridge.asking.answer(0)
        await until(lambda: bool(bridge.troubles))
    assert isinstance(bridge.troubles[0], RecordTooLarge) and not memory_log.records


@virtual
async def test_partition_processor_spends_quarter_of_time_on_slow_commits(
    memory_log: MemoryLog,
) -> None:
    """Under load, commits become larger and less frequent."""
    memory_log.commit_s = 1.0
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0, 1, 2)
        await until(lambda: len(bridge.asking.submitted_offsets) == 3)
        bridge.asking.answer(0)
        await until(lambda: 0 in memory_log.answers())
        for offset in (1, 2):
            bridge.asking.answer(offset)
        await pass_time(3.9)
        assert len(memory_log.answers()) == 1
        await pass_time(0.2)
        assert len(memory_log.answers()) == 3


@virtual
async def test_partition_processor_fails_after_uncertain_commit(memory_log: MemoryLog) -> None:
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        memory_log.trouble = BrokerUnavailable("nobody says whether it is done")
        bridge.asking.answer(0)
        await until(lambda: bool(bridge.troubles))
    assert isinstance(bridge.troubles[0], BrokerUnavailable) and not memory_log.answers()


@virtual
async def test_partition_processor_reports_unreadable_batch_as_one_error(
    memory_log: MemoryLog,
) -> None:
    """Later prompts are processed as usual."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        why = "offsets 1 to 3 cannot be read: zstd: no frame"
        await life.take(memory_log.put(3, unreadable_value(why), key=b""))
        await take(life, memory_log, 4)
        for offset in (0, 4):
            bridge.asking.answer(offset)
        await until(lambda: len(memory_log.answers()) == 3)
    answer = memory_log.answers()[3]
    assert (answer.error_code, answer.error_message) == ("undecodable_record", why)
    (letter,) = memory_log.letters
    assert letter["x-dlq-error-message"].decode() == why
    assert [outgoing.value for outgoing in memory_log.records if outgoing.topic == "rows.dlq"] == [
        None
    ]
    assert at(memory_log) == (5, set())


@virtual
async def test_partition_processor_reports_parser_exception_as_error(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug met in one prompt must not crash the bridge repeatedly."""
    bridge = Bridge(memory_log)
    read = bridge.ends.prompts.question

    async def question(record: Any) -> Any:
        if record.offset == 0:
            raise TypeError("ours")
        return await read(record)

    monkeypatch.setattr(bridge.ends.prompts, "question", question)
    async with bridge.living() as life:
        await take(life, memory_log, 0, 1)
        bridge.asking.answer(1)
        await until(lambda: len(memory_log.answers()) == 2)
    assert memory_log.answers()[0].error_message == "not read: TypeError: ours"
    assert len(memory_log.letters) == 1 and not bridge.troubles


@virtual
async def test_partition_processor_keeps_order_by_key(memory_log: MemoryLog) -> None:
    """A prompt is submitted once the answer or error before it is committed."""
    bridge = Bridge(memory_log, pair(ordered=True))
    async with bridge.living() as life:
        await life.take(memory_log.put(0, key=b"a"))
        await life.take(memory_log.put(1, key=b"a"))
        await life.take(memory_log.put(2, {}, key=b"a"))
        await life.take(memory_log.put(3, key=b"a"))
        await life.take(memory_log.put(4, key=b"b"))
        await until(lambda: bridge.asking.submitted_offsets == [0, 4])
        bridge.asking.answer(0)
        await until(lambda: bridge.asking.submitted_offsets == [0, 4, 1])
        assert sorted(memory_log.answers()) == [0]
        bridge.asking.answer(1)
        await until(lambda: bridge.asking.submitted_offsets == [0, 4, 1, 3])
        assert sorted(memory_log.answers()) == [0, 1, 2], "its error stands before it is asked"


@virtual
async def test_partition_processor_stops_reading_at_window(
    memory_log: MemoryLog,
) -> None:
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        taking = asyncio.ensure_future(life.take(memory_log.put(WINDOW)))
        await pass_time(1)
        assert not taking.done()
        for _ in range(3):
            await life.check_for_stall(WINDOW + 1, 0.5)  # one that waits for room is no stall
            await pass_time(1)
        bridge.asking.answer(0)
        await taking
        assert not bridge.troubles


@virtual
async def test_partition_processor_limits_bytes_of_window(
    memory_log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor reads as far ahead as its predecessor could."""
    monkeypatch.setattr(partition_processor, "WINDOW_BYTES", 4_000)
    monkeypatch.setattr(progress, "WINDOW_BYTES", 4_000)
    first, second = Bridge(memory_log), Bridge(memory_log)
    slept = first.life()
    await until(lambda: memory_log.commits == 1)
    for offset in range(3):
        await slept.take(memory_log.put(offset, value={"text": "a" * 1_200}))
    taking = asyncio.ensure_future(slept.take(memory_log.put(3, value={"text": "a" * 1_200})))
    await until(lambda: first.asking.submitted_offsets == [0, 1, 2])
    await pass_time(1)
    assert not taking.done()
    first.asking.answer(0)
    await taking
    assert memory_log.note.window_bytes == 4_000
    memory_log.put(4, value={"text": "a" * 1_200})
    async with second.living():
        await until(lambda: second.asking.submitted_offsets == [1, 2, 3])
        await pass_time(1)
        assert second.asking.submitted_offsets == [1, 2, 3], (
            "others had no room for what comes next, either"
        )
    assert not first.troubles
    await slept.stop()


@virtual
async def test_partition_processor_cancels_abandoned_batch_without_slot(
    memory_log: MemoryLog,
) -> None:
    """A cancelled batch of a thousand lines must not delay other prompts."""
    bridge = Bridge(memory_log)
    bridge.asking.given_up = set(range(20))
    async with bridge.living() as life:
        await take(life, memory_log, *range(20), value=b"no prompt at all")
        await take(life, memory_log, 20)
        await until(lambda: bridge.asking.submitted_offsets == [20])
        await until(lambda: len(memory_log.answers()) == 20)
        errors = {
            (answer.error_code, answer.error_message) for answer in memory_log.answers().values()
        }
    assert errors == {("cancelled", "its batch was given up")} and not memory_log.letters


@virtual
async def test_partition_processor_favours_owner_with_fewest_slots(memory_log: MemoryLog) -> None:
    """One prompt of a small tenant overtakes many of a large one."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        for offset in range(100):
            await life.take(memory_log.put(offset, key=b"many"))
        await life.take(memory_log.put(100, key=b"one"))
        await until(lambda: len(bridge.asking.submitted_offsets) == 8)
        bridge.asking.answer(3)
        await until(lambda: 100 in bridge.asking.submitted_offsets)
        assert len(bridge.asking.submitted_offsets) == 9


@virtual
async def test_partition_processor_ignores_released_slots_in_fairness(
    memory_log: MemoryLog,
) -> None:
    """Owners answered before do not rank behind owners that wait now."""
    bridge = Bridge(memory_log)
    async with bridge.living() as life:
        await take(life, memory_log, *range(8), key=b"a")
        await until(lambda: len(bridge.asking.submitted_offsets) == 8)
        for offset in range(8):
            bridge.asking.answer(offset)
        await until(lambda: len(memory_log.answers()) == 8)
        await take(life, memory_log, *range(8, 17), key=b"b")
        await take(life, memory_log, 17, key=b"a")
        await until(lambda: len(bridge.asking.submitted_offsets) == 16)
        bridge.asking.answer(8)
        await until(lambda: len(bridge.asking.submitted_offsets) == 17)
        assert bridge.asking.submitted_offsets[-1] == 17


@virtual
async def test_partition_processor_submits_only_while_allowed(memory_log: MemoryLog) -> None:
    """None is submitted between two assignments, nor after an absence."""
    bridge = Bridge(memory_log)
    bridge.shared.may_ask.clear()
    async with bridge.living() as life:
        await take(life, memory_log, 0)
        await pass_time(1)
        assert bridge.asking.submitted_offsets == []
        bridge.shared.may_ask.set()
        await until(lambda: bridge.asking.submitted_offsets == [0])
        bridge.asking.process.member.epoch = 2
        await take(life, memory_log, 1)
        await until(lambda: bool(bridge.troubles))
    assert isinstance(bridge.troubles[0], LeaseError) and bridge.asking.submitted_offsets == [0]
    assert "bridge-0: was away" in str(bridge.troubles[0])


@virtual
async def test_partition_processor_commits_new_token_offsets_first(
    memory_log: MemoryLog,
) -> None:
    bridge = Bridge(memory_log)
    bridge.asking.process.tokens.positions = {9: 1}
    async with bridge.living() as life:
        await until(lambda: memory_log.commits == 1)
        await take(life, memory_log, 0)
        await until(lambda: bridge.asking.submitted_offsets == [0])
        assert memory_log.note.tokens == {9: 1, **TOKENS} and memory_log.commits == 2
