"""What requests have used, told while routers, a worker and the broker die: the sums are those that
clients have counted, and each request has told once.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from infra.bench.faults.log_audit import audit
from infra.broker.node import Broker
from infra.broker.section import BrokerSettings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.story.usage import Check, read_usage
from schemas.errors import ConfigError
from schemas.records import OutcomeKind, Usage
from schemas.settings import LogSettings
from schemas.topics import partition_of
from tests.e2e.harness import Client, lasting_stack, met, sim_settings
from tests.long_leases import BRIEF_LEASE_MS, process_leases
from tests.waits import START_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

OWN_LEASES = process_leases(BRIEF_LEASE_MS)  # a sleeping router loses its own
ASKERS = 8
PARTITIONS = 2


class Counted:
    """What clients were told that their whole answers have used, by request."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, int]] = {}  # tokens of prompt and answer
        self.by_partition = [0] * PARTITIONS
        self.stopped = False

    async def ask(self, client: Client, number: int) -> None:
        """One question after the other, in a session each, until stopped."""
        question_number = 0
        while not self.stopped:
            question_number += 1
            session_id = f"s{number}-{question_number}"
            body = client.body(f"Question {number} {question_number}", max_tokens=20 + number)
            headers = {"X-Session-Id": session_id}
            try:
                response = await client.http.post(
                    "/v1/chat/completions", json=body, headers=headers
                )
            except httpx.TransportError:
                continue
            if response.status_code == 200:
                used = response.json()["usage"]
                tokens = (used["prompt_tokens"], used["completion_tokens"])
                self.answers[response.headers["x-request-id"]] = tokens
                self.by_partition[partition_of(session_id, PARTITIONS)] += 1

    async def wait_for_more(self, count: int) -> None:
        """Wait for `count` more answers of each partition, so that each has a router."""
        targets = [number + count for number in self.by_partition]

        def are_there() -> bool:
            pairs = zip(self.by_partition, targets, strict=True)
            return all(number >= target for number, target in pairs)

        await until(are_there, seconds=START_S)  # a broker that was killed may have to start


async def read_reported_usage(log: LogSettings, names: Callable[[], set[str]]) -> dict[str, Usage]:
    """Return the committed usage once all requests have reported it, each exactly once."""
    usages: dict[str, Usage] = {}

    async def is_there() -> bool:
        check = Check()
        usages.clear()
        async for partition, usage in read_usage(log):
            check.add(partition, usage)
            usages[usage.request_id] = usage
        assert check.holds, check
        return names() <= usages.keys()

    await until(is_there)
    return usages


async def disturb(running: Stack, counted: Counted, broker_pid: int) -> None:
    """One after the other, each when all is served again."""
    await counted.wait_for_more(5)
    await running.kill("router-0")
    await counted.wait_for_more(5)
    await running.kill("router-1", signal.SIGSTOP)  # until others have its partition
    await counted.wait_for_more(5)
    await running.kill("router-1", signal.SIGCONT)
    await counted.wait_for_more(5)
    await running.kill("replica-0")
    await counted.wait_for_more(5)
    os.kill(broker_pid, signal.SIGKILL)
    await counted.wait_for_more(5)


async def test_usage_sums_match_client_counts_despite_kills(tmp_path: Path) -> None:
    log = LogSettings(session_partitions=PARTITIONS, worker_partitions=2, gateway_partitions=2)
    broker_settings = BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=180.0)
    settings = replace(sim_settings(log), broker=broker_settings)
    plan = StackPlan(prefill=0, decode=0, replica=2, routers=2)
    routers = dict.fromkeys(("router-0", "router-1"), OWN_LEASES)
    running = lasting_stack(settings, plan, folder=tmp_path, env_by_process=routers)
    counted = Counted()
    try:
        await running.start(timeout_s=START_S)
        await met(running)
        async with Client(running.gateway_urls[0], settings.model.served_name) as client:
            asking = [asyncio.create_task(counted.ask(client, n)) for n in range(ASKERS)]
            await disturb(
                running, counted, Broker(broker_settings, tmp_path / "broker").status().pid
            )
            counted.stopped = True
            await asyncio.gather(*asking)
        log_audit = await audit(running.settings.log)
        usages = await read_reported_usage(running.settings.log, lambda: set(log_audit.requests))
    except ConfigError as error:
        if "broker.libs" not in error.message and "broker.java" not in error.message:
            raise
        pytest.skip(error.message)
    finally:
        counted.stopped = True
        await running.stop(grace_s=10)
    assert usages.keys() == log_audit.requests.keys()
    assert counted.answers == {
        name: (usage.prompt_tokens, usage.completion_tokens)
        for name, usage in usages.items()
        if usage.kind is OutcomeKind.COMPLETED and name in counted.answers
    }
