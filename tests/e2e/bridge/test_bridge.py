"""Prompts in, answers out, exactly one each, whatever dies."""

import dataclasses
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from schemas.settings import LogSettings
from streams.bridge.app import group_id
from streams.bridge.config import BridgeSettings, TopicPair
from streams.log.admin import create_extra_topics
from streams.log.transactions import committed_offsets
from tests.e2e.bridge.topics import AnswerReader, Sent, produce
from tests.e2e.harness import sim_settings, stack

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

KEPT_MS = 3_600_000


async def test_bridge_answers_each_prompt_once(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Answers keep key and partition; errors are answers; the offset is committed with them."""
    log = await kafka_with(gateway_partitions=4)
    sent_prompts = Sent()
    topic = log.topic_prefix + "prompts"
    values: list[tuple[str, object]] = [
        (f"k{n}", {"text": f"Question {n}", "max_tokens": 4}) for n in range(40)
    ]
    values += [("bad", {"text": "x", "max_tokens": -1}), ("none", {}), ("no", "{")]
    await produce(log, topic, values, sent_prompts)  # type: ignore[arg-type]  # texts and tables
    async with (
        stack(sim_settings(log), tmp_path, replica=1, bridges=1),
        AnswerReader(log, log.topic_prefix + "answers") as reader,
    ):
        read = await reader.until(len(sent_prompts.keys))
        late = Sent()
        await produce(log, topic, [("later", {"text": "And then?", "max_tokens": 4})], late)
        await reader.until(len(sent_prompts.keys) + 1)
        sent_prompts.keys |= late.keys
    assert read.counts == Counter({1: 44})
    for partition, answers in read.order.items():
        for key, place in answers:
            assert place[0] == partition and sent_prompts.keys[place] == key
    wrong = {
        sent_prompts.keys[at]: answer
        for at, (answer,) in read.values.items()
        if answer.get("error_code")
    }
    assert wrong.keys() == {"bad", "none", "no"}, json.dumps(wrong)
    places = [(topic, partition) for partition in range(log.prompt_partitions)]
    positions = await committed_offsets(log, group_id(log), places)
    for (_, number), position in positions.items():
        offsets = [offset for partition, offset in sent_prompts.keys if partition == number]
        assert position.offset == max(offsets) + 1


async def test_bridge_streams_parts_of_answers(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Numbers of parts have no gap; answers fit on a topic of fewer partitions."""
    log = await kafka_with(gateway_partitions=4)
    prompts, answers, parts = (log.topic_prefix + name for name in ("asks", "says", "pieces"))
    narrow = dataclasses.replace(log, prompt_partitions=1)
    await create_extra_topics(narrow, dict.fromkeys((answers, parts), KEPT_MS))
    await create_extra_topics(log, {prompts: KEPT_MS})
    pair = TopicPair(prompts=prompts, answers=answers, parts=parts)
    settings = dataclasses.replace(
        sim_settings(log, decode_step_ms=10.0), bridge=BridgeSettings(pairs=(pair,))
    )
    sent_prompts = Sent()
    values = [(f"k{n}", {"text": f"Question {n}", "max_tokens": 20}) for n in range(6)]
    values.append(("late", {"text": "x" * 20, "deadline_ms": 1, "max_tokens": 20}))
    await produce(log, prompts, values, sent_prompts)
    async with (
        stack(settings, tmp_path, replica=1, bridges=1),
        AnswerReader(narrow, answers) as reader,
        AnswerReader(narrow, parts) as pieces,
    ):
        read = await reader.until(len(values))
        while any(
            answer_parts[-1]["finish_reason"] == "" for answer_parts in pieces.read.values.values()
        ) or (len(pieces.read.values) < len(values)):
            await pieces.read_more()
    for place, (answer,) in read.values.items():
        if sent_prompts.keys[place] == "late":
            assert answer["error_code"] == "deadline_exceeded"
            assert pieces.read.values[place][-1]["finish_reason"] == "error"
            continue
        answer_parts = pieces.read.values[place]
        assert len(answer_parts) > 1, "it was told while it came"
        assert "".join(part["text"] for part in answer_parts) == answer["text"]
        assert sum(part["tokens"] for part in answer_parts) == answer["completion_tokens"] == 20
        assert [part["seq"] for part in answer_parts[1:]] == [
            part["seq"] + part["tokens"] for part in answer_parts[:-1]
        ]
        assert answer_parts[-1]["finish_reason"] == answer["finish_reason"]


async def test_bridge_answers_only_committed_transactions(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Aborted prompts have no answer, and transaction markers hold nothing up."""
    log = await kafka_with(gateway_partitions=4)
    topic = log.topic_prefix + "prompts"
    producer = AIOKafkaProducer(bootstrap_servers=log.bootstrap, transactional_id=topic)
    await producer.start()
    for n in range(6):
        await producer.begin_transaction()
        value = json.dumps({"text": f"Question {n}", "max_tokens": 2}).encode()
        await producer.send_and_wait(topic, value, key=b"k%d" % n, partition=0)
        if n % 3 == 1:
            await producer.abort_transaction()
        else:
            await producer.commit_transaction()
    await producer.stop()
    async with (
        stack(sim_settings(log), tmp_path, replica=1, bridges=1),
        AnswerReader(log, log.topic_prefix + "answers") as reader,
    ):
        await reader.until(4)
        read = await reader.read_more(timeout_ms=2_000)
    assert read.counts == Counter({1: 4})
    assert sorted(key for key, _ in read.order[0]) == ["k0", "k2", "k3", "k5"]
