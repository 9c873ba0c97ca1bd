"""Pools that change under load: workers join, leave, change roles and die, and nothing is lost."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from infra.bench.faults.log_audit import LogAudit, audit, read_topic
from infra.stack.fleet_watch import FleetWatch
from infra.stack.launcher import Stack
from infra.stack.reassignment import move_worker
from schemas.codec import Codec
from schemas.fleet import Member
from schemas.records import MemberState, OutcomeKind, Reason, Role, Work
from schemas.settings import LogSettings
from streams.core.fleet.workers import Life
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from tests.e2e.audits import answer_alone, overlooked
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import START_S, pause, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]
PREFILL, DECODE = Role.PREFILL, Role.DECODE
PER_S = 20  # conversations of two turns
OPEN_MAX = 32  # at once: a slow machine is not to be overwhelmed


class Operator:
    """Moves workers as `trivium pool move` does."""

    def __init__(self, log: LogSettings) -> None:
        self._log = log
        self._fleet = FleetWatch(log)
        self._producer = LogProducer(log, Codec(), durable=True, client_id="operator")
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Operator":
        await self._producer.start()
        await self._fleet.start()
        self._following = asyncio.create_task(self._fleet.follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._fleet.stop()
        await self._producer.stop()

    async def move(self, worker_id: str, *roles: Role) -> None:
        await until(lambda: self._is_ready(worker_id))  # who started it may know that sooner
        await move_worker(
            self._fleet, self._producer, self._log, worker_id, roles, timeout_s=START_S
        )

    def _is_ready(self, worker_id: str) -> bool:
        member = self._fleet.view.members.get(worker_id)
        return (
            member is not None and member.state is MemberState.READY and member.is_alive(wall_ms())
        )

    async def sees_again(self, before: Member) -> None:
        name, epoch = before.member_id, before.epoch
        await until(lambda: self.worker(name).epoch > epoch, seconds=START_S)

    def lives(self, life: Life) -> bool:
        member = self.worker(life[0])
        return member.epoch == life[1] and member.is_alive(wall_ms())

    def worker(self, worker_id: str) -> Member:
        return self._fleet.view.members[worker_id]


class Load:
    """Conversations that arrive at a steady rate until stopped, whatever becomes of them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._random = random.Random(4)
        self._conversations: list[asyncio.Task[list[Answer]]] = []
        self._open = asyncio.Semaphore(OPEN_MAX)
        self.answers: list[Answer] = []
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        while not self.stopped.is_set():
            number = len(self._conversations)
            opening = f"Question {number}: " + "logs and streams " * self._random.randrange(1, 25)
            await self._open.acquire()
            self._conversations.append(asyncio.create_task(self._converse(opening)))
            await pause(1 / PER_S)
        await asyncio.gather(*self._conversations)

    async def wait_for_more(self, count: int) -> None:
        """Wait until so many more answers have come."""
        target = len(self.answers) + count
        await until(lambda: len(self.answers) >= target, seconds=START_S)

    async def decoded_by(self, worker_id: str) -> None:
        """Wait until an answer has come from this worker."""
        await until(
            lambda: any(
                answer.trivium.get("decode_worker") == worker_id for answer in self.answers
            ),
            seconds=START_S,
        )

    async def _converse(self, opening: str) -> list[Answer]:
        messages = [{"role": "user", "content": opening}]
        answers = []
        try:
            for turn in range(2):
                answer = await self._ask(messages)
                answers.append(answer)
                self.answers.append(answer)
                messages.append({"role": "assistant", "content": answer.text})
                messages.append({"role": "user", "content": f"And then? {turn}"})
        finally:
            self._open.release()
        return answers

    async def _ask(self, messages: list[dict[str, str]]) -> Answer:
        """Ask again while a gateway refuses because it doubts its lease."""
        while True:
            answer = await self._client.stream("", messages=messages, max_tokens=24)
            if answer.error.get("code") != "broker_unavailable":
                return answer
            await pause(0.1)


async def orders_of(log: LogSettings, life: Life) -> int:
    """How many orders to decode a worker's life has been given."""
    orders = [record for record in await read_topic(log, "decode") if isinstance(record, Work)]
    return sum((order.worker_id, order.worker_epoch) == life for order in orders)


async def dies_with_an_order(running: Stack, operator: Operator) -> bool:
    """Stop decode-1, and kill it when it has been given an order since, which nobody will take; or
    when its lease is over without one. Whether there was one."""
    before = operator.worker("decode-1")
    life, log = (before.member_id, before.epoch), running.settings.log
    await running.kill("decode-1", signal.SIGSTOP)
    order_count = await orders_of(log, life)

    async def has_one_or_is_over() -> bool:
        return not operator.lives(life) or await orders_of(log, life) > order_count

    await until(has_one_or_is_over)
    await running.kill("decode-1", signal.SIGKILL)
    return await orders_of(log, life) > order_count


async def check(running: Stack, log: LogSettings, answers: list[Answer]) -> LogAudit:
    """Every request has one outcome, a completed one, with the tokens of an engine alone."""
    log_audit = await audit(log)
    assert len(log_audit.requests) == len(answers)
    assert log_audit.kinds() == {OutcomeKind.COMPLETED.value: len(answers)}
    assert all(answer.is_done for answer in answers)
    expected = await answer_alone(running.settings, log_audit.requests.values())
    wrong = [
        answer.headers["x-request-id"]
        for answer in answers
        if answer.token_ids != expected[answer.headers["x-request-id"]].token_ids
    ]
    assert wrong == []
    return log_audit


async def test_pools_lose_nothing_while_workers_join_move_and_die(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    log = await kafka_with(worker_partitions=8)
    settings = sim_settings(log, decode_step_ms=4.0)
    async with (
        stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, prefill=2, decode=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
        Operator(log) as operator,
    ):
        load = Load(client)
        loading = asyncio.create_task(load.run())
        await load.wait_for_more(40)
        await running.scale(prefill=3)
        await operator.move("prefill-2", PREFILL, DECODE)
        await load.wait_for_more(20)
        await operator.move("prefill-0", DECODE)
        await load.decoded_by("prefill-0")
        await operator.move("decode-1", PREFILL, DECODE)
        await load.wait_for_more(20)
        was_given = False
        while not was_given:
            before = operator.worker("decode-1")
            was_given = await dies_with_an_order(running, operator)
            await load.wait_for_more(40)
            await running.wait_ready("decode-1")
            await operator.sees_again(before)
        assert operator.worker("decode-1").registration.roles == before.registration.roles
        await running.scale(prefill=2, decode=3)  # drains prefill-2, which has both roles
        await load.decoded_by("decode-2")
        await operator.move("prefill-0", PREFILL)
        await load.wait_for_more(20)
        load.stopped.set()
        await loading
        log_audit = await check(running, log, load.answers)
    life = (before.member_id, before.epoch)
    lost_ms = [
        d.at_ms
        for d in log_audit.of_kind("void")
        if d.reason is Reason.WORKER_LOST
        and life in ((d.prefill_worker, d.prefill_epoch), (d.decode_worker, d.decode_epoch))
    ]
    assert lost_ms
    assert await overlooked(log, "router-0", life, min(lost_ms)) == []
