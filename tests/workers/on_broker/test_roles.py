"""A worker moves between pools on a real broker, under load; the test is router and gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infra.stack.fleet_watch import FleetWatch
from infra.stack.reassignment import move_worker
from schemas.errors import ConfigError, NotReady
from schemas.records import (
    Mode,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    WorkPhase,
)
from schemas.settings import LogSettings
from tests.waits import PATIENCE_S, until
from tests.workers.on_broker.router import Router, chat, router_of, worker_of

pytestmark = pytest.mark.kafka
PREFILL, DECODE, REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA


class Load:
    """Requests for the worker that moves, in any of its roles; refused ones are retried."""

    def __init__(self, router: Router, mover: str, peer: str) -> None:
        self.router, self.mover, self.peer = router, mover, peer
        self.phases_run = {WorkPhase.PREFILL: 0, WorkPhase.DECODE: 0}
        self.refused = 0
        self.stop = asyncio.Event()

    async def run(self) -> list[str]:
        """Run four streams of requests until stopped; return the ids of all requests."""
        streams = await asyncio.gather(*(self._stream(number) for number in range(4)))
        return [request_id for stream in streams for request_id in stream]

    async def _stream(self, stream: int) -> list[str]:
        request_ids: list[str] = []
        while not self.stop.is_set():
            request_ids.append(f"r{stream}-{len(request_ids)}")
            await self._request(request_ids[-1], len(request_ids) % 2 == 0)
        return request_ids

    async def _request(self, request_id: str, prefill_first: bool) -> None:
        attempt = 0
        while not self.router.of(Outcome, request_id):
            attempt += 1
            roles = self.router.membership.view.members[self.mover].registration.roles
            if PREFILL in roles and (prefill_first or DECODE not in roles):
                await self._remote(request_id, attempt)
            else:
                await self._local(request_id, attempt)

    async def _remote(self, request_id: str, attempt: int) -> None:
        prefill_phase = await self._send_and_wait(
            request_id, attempt, WorkPhase.PREFILL, self.mover
        )
        if prefill_phase is None:
            return
        handover = {
            "first_seq": prefill_phase.sent_tokens,
            "first_char": prefill_phase.sent_chars,
            "kv": prefill_phase.kv,
        }
        await self._send_and_wait(request_id, attempt, WorkPhase.DECODE, self.peer, **handover)

    async def _local(self, request_id: str, attempt: int) -> None:
        await self._send_and_wait(
            request_id, attempt, WorkPhase.DECODE, self.mover, mode=Mode.LOCAL
        )

    async def _send_and_wait(
        self, request_id: str, attempt: int, phase: WorkPhase, worker_id: str, **changes: Any
    ) -> Phase | None:
        """Send work and wait for its end: the phase after prefill, nothing otherwise."""
        address = self.router.address(worker_id)
        order = chat(request_id, phase, attempt=attempt, **changes, **address)
        await self.router.send(phase.value, order, worker_id)

        def reports() -> list[Phase]:
            phases = self.router.of(Phase, request_id)
            own_phases = [p for p in phases if p.attempt == attempt and p.worker_id == worker_id]
            return [p for p in own_phases if p.kind is not PhaseKind.KV_RECEIVED]

        await until(lambda: bool(reports() or self.router.of(Outcome, request_id)))
        if any(phase.kind is PhaseKind.REFUSED for phase in reports()):
            self.refused += 1
            return None
        self.phases_run[phase] += worker_id == self.mover
        return reports()[0] if reports() else None


@asynccontextmanager
async def fleet_of(settings: LogSettings) -> AsyncIterator[FleetWatch]:
    fleet = FleetWatch(settings)
    await fleet.start()
    following = asyncio.create_task(fleet.follow())
    try:
        yield fleet
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await fleet.stop()


async def test_worker_loses_no_request_while_moving_under_load(kafka: LogSettings) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(router, "other", DECODE),
        worker_of(router, "mover", PREFILL),
        fleet_of(router.settings) as fleet,
    ):
        load = Load(router, "mover", "other")
        running = asyncio.create_task(load.run())

        async def serve(phase: WorkPhase, count: int = 12) -> None:
            target = load.phases_run[phase] + count
            await until(lambda: running.done() or load.phases_run[phase] >= target)
            assert not running.done(), running.result()

        async def move(*roles: Role) -> None:
            await move_worker(fleet, router.producer, kafka, "mover", roles, timeout_s=PATIENCE_S)

        epoch = router.membership.view.members["mover"].epoch
        await serve(WorkPhase.PREFILL)
        await move(DECODE)
        await serve(WorkPhase.DECODE)
        await move(PREFILL, DECODE)
        await serve(WorkPhase.PREFILL)
        await serve(WorkPhase.DECODE)
        await move(PREFILL)
        await serve(WorkPhase.PREFILL)
        load.stop.set()
        requests = await running

        outcomes = [router.of(Outcome, request_id) for request_id in requests]
        assert {
            (len(request_outcomes), request_outcomes[0].kind) for request_outcomes in outcomes
        } == {(1, OutcomeKind.COMPLETED)}
        await until(lambda: all(len(router.answer(request_id)[0]) == 12 for request_id in requests))
        assert (
            len({router.answer(request_id)[1] for request_id in requests}) == 1
        )  # all ask the same
        assert router.membership.view.members["mover"].epoch == epoch


async def test_worker_move_error_gives_reason(kafka: LogSettings) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(router, "p", PREFILL),
        worker_of(router, "r", REPLICA, transfer="none"),
        fleet_of(router.settings) as fleet,
    ):

        async def fails(worker_id: str, *roles: Role, within_s: float = PATIENCE_S) -> str:
            with pytest.raises((ConfigError, NotReady)) as raised:
                await move_worker(
                    fleet, router.producer, kafka, worker_id, roles, timeout_s=within_s
                )
            return raised.value.message

        assert await fails("q", DECODE) == "no worker 'q' lives; expected one of: p, r"
        assert "decode and replica share" in await fails("p", DECODE, REPLICA)
        assert "it can be a replica" in await fails("r", DECODE)
        assert "is still prefill after 0 s" in await fails("p", DECODE, within_s=0)


async def test_worker_starts_with_several_roles(kafka: LogSettings) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(router, "both", [PREFILL, DECODE]),
    ):
        at = router.address("both")
        await router.send("prefill", chat("r1", WorkPhase.PREFILL, **at), "both")
        await router.send("decode", chat("r2", WorkPhase.DECODE, **at), "both")
        await until(lambda: router.of(Phase, "r1") != [] and router.of(Outcome, "r2") != [])
        (prefill_phase,) = router.of(Phase, "r1")
        handover = {
            "first_seq": prefill_phase.sent_tokens,
            "first_char": prefill_phase.sent_chars,
            "kv": prefill_phase.kv,
        }
        await router.send("decode", chat("r1", WorkPhase.DECODE, **handover, **at), "both")
        await until(lambda: router.of(Outcome, "r1") != [])
        await until(lambda: len(router.answer("r1")[0]) == len(router.answer("r2")[0]) == 12)
        assert router.answer("r1") == router.answer("r2")
