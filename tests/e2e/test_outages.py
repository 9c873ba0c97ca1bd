"""A stack that loses its only broker several times, once for long, under load: nothing is lost."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from infra.bench.faults.kill_schedule import BROKER, KILL, FaultInjector, InjectedFault
from infra.bench.faults.log_audit import audit
from infra.broker.section import BrokerSettings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.stack.statefile import NO_BROKER, read_state
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from tests.e2e.audits import answer_alone
from tests.e2e.harness import Answer, Client, sim_settings
from tests.waits import START_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOKENS, STREAMS = 300, 6
AWAY_S = (0.0, 0.0, 20.0)  # how long the broker stays away, time after time
PLAN = StackPlan(prefill=1, decode=2, retrieval=1)


async def test_stack_loses_nothing_over_repeated_broker_outages(
    tmp_path: Path,
) -> None:
    """Every answer is right and whole, and every process is the one it was."""
    log = LogSettings(session_partitions=1, worker_partitions=4, gateway_partitions=2)
    broker_settings = BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=180.0)
    settings = replace(sim_settings(log, decode_step_ms=5.0), broker=broker_settings)
    stack = Stack(settings, PLAN, folder=tmp_path)
    try:
        await stack.start(timeout_s=START_S)
        before = {name: process.pid for name, process in stack.processes.items()}
        async with Client(stack.gateway_urls[0], settings.model.served_name) as client:
            answers = await _asked_meanwhile(stack, client)
        log_audit = await audit(stack.settings.log)
        expected = await answer_alone(stack.settings, log_audit.requests.values())
        after = {name: process.pid for name, process in stack.processes.items()}
        assert after == before
        assert not any(process.restarts for process in stack.processes.values())
    except ConfigError as error:
        if "broker.libs" not in error.message and "broker.java" not in error.message:
            raise
        pytest.skip(error.message)
    finally:
        await stack.stop(grace_s=10)
    assert [answer.error for answer in answers if not answer.is_done] == []
    for answer in answers:
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids


async def _asked_meanwhile(stack: Stack, client: Client) -> list[Answer]:
    """Streams that are under way whenever the broker dies, and one after each of its returns."""
    killer, answers = FaultInjector(stack), list[Answer]()
    for number, away_s in enumerate(AWAY_S):
        partial_answers = [Answer() for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(client.stream(f"{number} {n}", into=a, max_tokens=TOKENS))
            for n, a in enumerate(partial_answers)
        ]
        await until(partial(_are_streaming, partial_answers))
        blow = asyncio.create_task(
            killer.inject(InjectedFault(at_s=0, name=BROKER, how=KILL, lasts_s=away_s))
        )
        if away_s:
            await until(lambda: _process_states(stack) == {NO_BROKER})
        await blow
        answers += await asyncio.gather(*tasks)
        await stack.wait_ready(timeout_s=START_S)
        answers.append(await client.stream(f"After {number}"))
    return answers


def _are_streaming(partial_answers: list[Answer]) -> bool:
    return all(len(answer.token_ids) > 20 for answer in partial_answers)


def _process_states(stack: Stack) -> set[str]:
    """Return the states that `trivium status` reports without a broker."""
    state = read_state(stack.folder)
    assert state is not None
    return {row.state for row in state.processes}
