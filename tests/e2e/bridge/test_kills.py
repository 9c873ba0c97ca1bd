"""Exactly one answer for each prompt, in the order of their keys, whatever dies."""

import dataclasses
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.broker.node import Broker
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.bridge.config import BridgeSettings, TopicPair
from streams.log.admin import create_extra_topics
from tests.e2e.bridge.topics import AnswerReader, Read, Sent, produce
from tests.e2e.harness import met, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import START_S

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

KEYS = 24
KEPT_MS = 3_600_000
PROMPTS = 400
TOKENS = 24
STEP_MS = 20.0  # so an answer takes half a second, and there is always something under way
ANSWERED_ASLEEP = 0.9  # more than the partitions of one bridge have
# Workers are lost and doubted here, and each time costs a try.
TRIES_MAX = 20


@dataclasses.dataclass
class Running:
    """Prompts that are being answered while a test kills what it likes."""

    stack: Stack
    sent_prompts: Sent
    reader: AnswerReader

    async def answered(self, share: float) -> None:
        """Wait until so much of it has an answer, and more is under way."""
        await self.reader.until(int(share * len(self.sent_prompts.keys)))


def settings_of(log: LogSettings) -> Settings:
    """With an ordered pair."""
    prompts, answers = log.topic_prefix + "questions", log.topic_prefix + "replies"
    pair = TopicPair(prompts=prompts, answers=answers, ordered=True, tries_max=TRIES_MAX)
    settings = sim_settings(log, decode_step_ms=STEP_MS)
    return dataclasses.replace(settings, bridge=BridgeSettings(pairs=(pair,)))


async def send_prompts(log: LogSettings) -> Sent:
    """Send more prompts than can be active at once."""
    prompts, answers = log.topic_prefix + "questions", log.topic_prefix + "replies"
    await create_extra_topics(log, dict.fromkeys((prompts, answers), KEPT_MS))
    sent_prompts = Sent()
    values = [
        (f"key-{n % KEYS}", {"text": f"Question {n}", "max_tokens": TOKENS}) for n in range(PROMPTS)
    ]
    await produce(log, prompts, values, sent_prompts)
    return sent_prompts


@asynccontextmanager
async def running(log: LogSettings, folder: Path, **plan: Any) -> AsyncIterator[Running]:
    """A stack that answers them."""
    sent_prompts = await send_prompts(log)
    async with (
        stack(settings_of(log), folder, lease_ms=BRIEF_LEASE_MS, **plan) as started,
        AnswerReader(log, log.topic_prefix + "replies") as reader,
    ):
        yield Running(started, sent_prompts, reader)


def check(sent_prompts: Sent, read: Read) -> None:
    """One answer each, none of them an error, in the order of their keys."""
    assert read.values.keys() == sent_prompts.keys.keys()
    assert read.counts == Counter({1: len(sent_prompts.keys)})
    wrong = [value for (value,) in read.values.values() if value.get("error_code")]
    assert not wrong, wrong[0]
    prompt_places: dict[str, list[tuple[int, int]]] = {}
    answer_places: dict[str, list[tuple[int, int]]] = {}
    for place, key in sorted(sent_prompts.keys.items()):
        prompt_places.setdefault(key, []).append(place)
    for answers in read.order.values():
        for key, place in answers:
            answer_places.setdefault(key, []).append(place)
    assert answer_places == prompt_places


async def test_bridge_answers_once_despite_killed_processes(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    log = await kafka_with(gateway_partitions=6)
    async with running(log, tmp_path, replica=2, routers=2, bridges=2) as now:
        for share, victim in (
            (0.05, "bridge-0"),
            (0.2, "replica-0"),
            (0.3, "router-0"),
            (0.4, "bridge-1"),
            (0.5, "bridge-0"),
            (0.5, "bridge-1"),
            (0.7, "router-1"),
        ):
            await now.answered(share)
            await now.stack.kill(victim)
        await now.answered(1.0)
        read = await now.reader.read_more(timeout_ms=3_000)
    check(now.sent_prompts, read)


async def test_bridge_answers_nothing_twice_after_suspension(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """It sleeps longer than its group waits, so another bridge takes its partitions."""
    log = await kafka_with(gateway_partitions=6)
    async with running(log, tmp_path, replica=1, bridges=2) as now:
        await now.answered(0.1)
        await now.stack.kill("bridge-0", signal.SIGSTOP)
        await now.answered(ANSWERED_ASLEEP)  # so the other one has its partitions
        await now.stack.kill("bridge-0", signal.SIGCONT)
        await now.answered(1.0)
        read = await now.reader.read_more(timeout_ms=3_000)
    check(now.sent_prompts, read)


async def test_bridge_answers_once_despite_killed_broker(tmp_path: Path) -> None:
    """The broker is killed midway, and once more while its clients reconnect."""
    log = LogSettings(session_partitions=1, worker_partitions=2, gateway_partitions=4)
    broker_settings = BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=180.0)
    settings = dataclasses.replace(settings_of(log), broker=broker_settings)
    new_stack = Stack(
        settings, StackPlan(prefill=0, decode=0, replica=1, bridges=1), folder=tmp_path
    )
    try:
        await new_stack.start(timeout_s=START_S)
        await met(new_stack)
        log = new_stack.settings.log
        sent_prompts = await send_prompts(log)
        async with AnswerReader(log, "replies") as reader:
            now = Running(new_stack, sent_prompts, reader)
            for share in (0.2, 0.5):
                await now.answered(share)
                broker = Broker(broker_settings, tmp_path / "broker").status()
                assert broker.running
                os.kill(broker.pid, signal.SIGKILL)
            await now.answered(1.0)
            read = await reader.read_more(timeout_ms=3_000)
        assert new_stack.processes["bridge-0"].restarts == 0
    except ConfigError as error:
        if "broker.libs" not in error.message and "broker.java" not in error.message:
            raise
        pytest.skip(error.message)
    finally:
        await new_stack.stop(grace_s=10)
    check(sent_prompts, read)
