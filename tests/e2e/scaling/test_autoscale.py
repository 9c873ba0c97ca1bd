"""A stack that follows what waits: workers start, move and leave under load, and nothing is lost
(issue 14, 3).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.scaling.settings import ScalingSettings
from infra.stack.autoscaler import Autoscaler
from infra.stack.launcher import Stack
from schemas.fleet import Member
from schemas.log.clock import wall_ms
from schemas.records import MemberState, Role
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]
PREFILL, DECODE = Role.PREFILL, Role.DECODE
SCALING = ScalingSettings(
    ttft_ms=500, settle_ms=4_000, up_after_ms=1_000, down_after_ms=6_000, workers_max=3
)
# A worker decodes two answers at a time, and computes one prompt after the other.
ENGINE: dict[str, Any] = {
    "decode_step_ms": 20.0,
    "running_max": 2,
    "prefill_running_max": 1,
    "prefill_ms_per_token": 0.5,
}
WAIT_S = 120


class Askers:
    """So many clients that ask again and again, until they are told to stop."""

    def __init__(self, client: Client, count: int, text: str, max_tokens: int) -> None:
        self.answers: list[Answer] = []
        self._stopped = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._ask(client, f"{number} {text}", max_tokens))
            for number in range(count)
        ]

    async def _ask(self, client: Client, text: str, max_tokens: int) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            asked = f"{number} {text}"
            self.answers.append(await client.chat(asked, max_tokens=max_tokens))

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)
        failed = [each.error for each in self.answers if each.status != 200]
        assert self.answers and not failed


@asynccontextmanager
async def scaled(running: Stack) -> AsyncIterator[None]:
    task = asyncio.create_task(Autoscaler(running).run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pools(running: Stack) -> tuple[int, int]:
    """Ready workers that prefill, and that decode."""
    assert running.fleet is not None
    names = running.plan.names()
    roles = [
        member.registration.roles
        for member in running.fleet.view.members.values()
        if member.member_id in names and serves(member)
    ]
    return sum(PREFILL in each for each in roles), sum(DECODE in each for each in roles)


def serves(member: Member) -> bool:
    return member.state is MemberState.READY and member.lives(wall_ms())


async def test_workers_start_move_and_leave_as_the_load_wants(
    kafka: LogSettings, tmp_path: Path
) -> None:
    settings = replace(sim_settings(kafka, **ENGINE), scaling=SCALING)
    async with stack(settings, tmp_path / "home", prefill=1, decode=1) as running, scaled(running):
        model = running.settings.model.served_name
        async with Client(running.gateway_urls[0], model) as client:
            long_answers = Askers(client, 8, "Tell me a story.", max_tokens=150)
            await until(lambda: pools(running) == (1, 2), seconds=WAIT_S)
            lives = {name: process.pid for name, process in running.processes.items()}
            await long_answers.stop()

            long_prompts = Askers(client, 8, "and so on " * 200, max_tokens=1)
            await until(lambda: pools(running) == (2, 1), seconds=WAIT_S)
            assert {name: process.pid for name, process in running.processes.items()} == lives
            assert await metric(running.gateway_urls[0], "prefill") == 2
            await long_prompts.stop()

            await until(lambda: pools(running) == (1, 1), seconds=WAIT_S)
            assert (await client.chat("Are you there?")).status == 200
            assert (
                len([name for name in running.plan.names() if "code" in name or "fill" in name])
                == 2
            )


async def metric(url: str, pool: str) -> float:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).text
    (line,) = [each for each in text.splitlines() if f'_wanted{{pool="{pool}"}}' in each]
    return float(line.rpartition(" ")[2])
