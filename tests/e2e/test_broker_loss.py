"""A stack whose only broker is killed: streams wait, and go on where they stood when it is back."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bench.faults.log_audit import audit
from infra.broker.node import Broker
from infra.broker.section import BrokerSettings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, met, sim_settings
from tests.waits import START_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOKENS = 600  # at 5 ms each: long enough to be caught in the middle


async def test_stream_continues_after_broker_restart(tmp_path: Path) -> None:
    log = LogSettings(session_partitions=1, worker_partitions=2, gateway_partitions=2)
    broker_settings = BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=180.0)
    settings = replace(sim_settings(log, decode_step_ms=5.0), broker=broker_settings)
    running = Stack(settings, StackPlan(prefill=1, decode=1), folder=tmp_path)
    try:
        await running.start(timeout_s=START_S)
        await met(running)
        async with Client(running.gateway_urls[0], settings.model.served_name) as client:
            expected = await client.stream("Go on", max_tokens=TOKENS)
            partial_answer = Answer()
            task = asyncio.create_task(
                client.stream("Go on", into=partial_answer, max_tokens=TOKENS)
            )
            await until(lambda: len(partial_answer.token_ids) > 20)
            broker = Broker(broker_settings, tmp_path / "broker").status()
            assert broker.running
            os.kill(broker.pid, signal.SIGKILL)
            answer = await task
            assert answer.is_done
            assert answer.token_ids == expected.token_ids
        assert running.processes["gateway-0"].restarts == 0
        await audit(running.settings.log)
    except ConfigError as error:
        if "broker.libs" not in error.message and "broker.java" not in error.message:
            raise
        pytest.skip(error.message)
    finally:
        await running.stop(grace_s=10)
