"""A stack that is scaled, and clients that ask it again and again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from infra.stack.autoscaler import Autoscaler
from infra.stack.launcher import Stack
from schemas.fleet import Member
from schemas.records import MemberState, Role
from streams.log.clock import wall_ms
from tests.e2e.harness import Answer, Client
from tests.waits import PATIENCE_S


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
            question = f"{number} {text}"
            self.answers.append(await client.chat(question, max_tokens=max_tokens))

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)
        failed = [answer.error for answer in self.answers if answer.status != 200]
        assert self.answers and not failed


@asynccontextmanager
async def scaled(running: Stack) -> AsyncIterator[Autoscaler]:
    """It follows what its pools want meanwhile."""
    scaler = Autoscaler(running)
    task = asyncio.create_task(scaler.run())
    try:
        yield scaler
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
    return sum(Role.PREFILL in worker_roles for worker_roles in roles), sum(
        Role.DECODE in worker_roles for worker_roles in roles
    )


def serves(member: Member) -> bool:
    return member.state is MemberState.READY and member.is_alive(wall_ms())


async def metric(url: str, pool: str) -> float:
    """How many workers a gateway says that a pool wants."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        text = (await http.get(f"{url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("trivium_workers_wanted{")]
    (line,) = [line for line in lines if f'pool="{pool}"' in line]
    return float(line.rpartition(" ")[2])
