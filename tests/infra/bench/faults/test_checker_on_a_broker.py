"""The checker reads raw topics as committed, whatever else lies in them."""

import json
from pathlib import Path

import pytest

from infra.bench.faults.checker import check
from infra.bench.faults.verdict import pairs_task
from infra.bench.platform.questions import draw_questions
from schemas.codec import AVRO_DIR, Codec
from schemas.records import Answer
from schemas.settings import LogSettings
from streams.log.transactions import CommittedOffset, OutgoingRecord, Transactions
from tests.waits import until

pytestmark = pytest.mark.kafka


def answered(log: LogSettings, number: int, offset: int) -> OutgoingRecord:
    topic = f"{log.topic_prefix}prompts"
    answer = Answer(
        prompt_topic=topic,
        prompt_partition=0,
        prompt_offset=offset,
        request_id=f"r{number}",
        text="!",
    )
    header_fields = {"topic": topic, "partition": 0, "offset": offset}
    headers = tuple(
        (f"trivium-prompt-{k}", str(field).encode()) for k, field in header_fields.items()
    )
    value, target = Codec().encode(answer), f"{log.topic_prefix}answers"
    return OutgoingRecord(topic=target, partition=0, key=b"k", value=value, headers=headers)


async def test_checker_counts_only_committed_records(kafka: LogSettings, tmp_path: Path) -> None:
    """One prompt has one answer, one has two, one has none."""
    log = kafka
    topic = f"{log.topic_prefix}prompts"
    prompts, bridge = Transactions(log, "bench"), Transactions(log, "bridge")
    await prompts.start()
    await bridge.start()
    questions = list(draw_questions(3, 1))
    values = [question.prompt(Codec()) for question in questions]
    offsets = await prompts.commit(
        [OutgoingRecord(topic=topic, partition=0, key=b"k", value=value) for value in values]
    )
    sends = [answered(log, number, offsets[min(number, 1)]) for number in range(3)]
    positions = {(topic, 0): CommittedOffset(offsets[2])}
    await bridge.commit(sends, positions, f"{log.topic_prefix}bridge")
    for transactions in (prompts, bridge):
        await transactions.stop()
    notes = tmp_path / "notes"
    notes.write_text("".join(json.dumps({"p": 0, "o": offset}) + "\n" for offset in offsets))
    wish = json.loads(json.dumps(pairs_task(log, notes=notes, http=tmp_path / "http")))
    assert wish["schemas"] == str(AVRO_DIR)

    async def all_is_seen() -> bool:
        return bool((await check(wish))["pairs"][topic]["answers"] == 3)

    await until(all_is_seen)
    report = (await check(wish))["pairs"][topic]
    assert (report["prompts"], report["sent"], report["sent_but_not_there"]["count"]) == (3, 3, 0)
    assert report["missing"]["some"] == [f"(0, {offsets[2]})"]
    assert report["double"]["some"] == [f"(0, {offsets[1]})"]
    assert report["lag"] == 1
