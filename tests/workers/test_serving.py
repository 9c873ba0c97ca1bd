"""A worker that serves: idle, with a dead engine, and drained."""

import asyncio
from typing import Any

import pytest

from schemas.errors import (
    BrokerUnavailable,
    EngineDead,
)
from schemas.records import (
    MemberState,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    WorkPhase,
)
from streams.log.clock import wall_ms
from tests.virtual_time import virtual
from tests.waits import until
from tests.workers.fakes import (
    handle,
    out,
    work,
)
from tests.workers.running_worker import running_worker
from workers.llm.engine import EngineLoad


async def test_idle_worker_does_not_poll() -> None:
    async with running_worker() as worker:
        turns = 0
        loop: Any = asyncio.get_running_loop()
        run_once = loop._run_once

        def counted() -> None:
            nonlocal turns
            turns += 1
            run_once()

        loop._run_once = counted
        timer = asyncio.Event()
        loop.call_later(0.3, timer.set)
        await timer.wait()
        del loop._run_once
        assert worker.membership.states[-1] is MemberState.READY
        assert turns <= 5


@pytest.mark.parametrize("error", [EngineDead("core died"), RuntimeError("adapter bug")])
async def test_worker_fails_all_requests_when_engine_dies(error: Exception) -> None:
    async with running_worker() as worker:
        await worker.submit(work(), work("r2", WorkPhase.PREFILL))
        worker.engine.die(error)
        assert isinstance(await worker.wait_for_exit(), EngineDead)
        phases = worker.log.of(Phase)
        assert {p.request_id for p in phases} == {"r1", "r2"}
        assert {p.kind for p in phases} == {PhaseKind.FAILED}
        assert all(p.error.code == "engine_dead" and p.error.retriable for p in phases)
        assert worker.membership.has_left
        assert worker.engine.closed


async def test_worker_ends_when_engine_load_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_worker() as worker:
        await worker.submit(work())

        def load() -> EngineLoad:
            raise EngineDead("no answer")

        monkeypatch.setattr(worker.engine, "load", load)
        worker.membership.add_router("router-a")  # asks for a heartbeat
        assert isinstance(await worker.wait_for_exit(), EngineDead)
        assert [p.error.code for p in worker.log.of(Phase)] == ["engine_dead"]
        assert worker.membership.has_left


async def test_drain_finishes_active_requests_and_refuses_new_ones() -> None:
    async with running_worker() as worker:
        await worker.submit(work())
        worker.stop.set()
        await until(lambda: worker.membership.states[-1] is MemberState.DRAINING)
        worker.decode.put(work("r2"))
        await until(lambda: worker.log.of(Phase) != [])
        assert worker.log.of(Phase)[0].kind is PhaseKind.REFUSED
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        assert await worker.wait_for_exit() is None
        assert [o.kind for o in worker.log.of(Outcome)] == [OutcomeKind.COMPLETED]
        assert (worker.membership.has_left, worker.engine.closed, worker.decode.stopped) == (
            True,
        ) * 3


@virtual
async def test_drain_fails_requests_after_timeout() -> None:
    async with running_worker(drain_timeout_ms=50) as worker:
        await worker.submit(work())
        worker.stop.set()
        assert await worker.wait_for_exit() is None
        (phase,) = worker.log.of(Phase)
        assert (phase.kind, phase.error.code) == (PhaseKind.FAILED, "worker_refused")
        assert phase.error.retriable
        assert worker.engine.aborted == ["r1.1"]


@virtual
async def test_drain_fails_without_acknowledged_reports() -> None:
    async with running_worker(drain_timeout_ms=50) as worker:
        worker.log.held_acks["phases"] = []
        await worker.submit(work())
        worker.stop.set()
        assert isinstance(await worker.wait_for_exit(), BrokerUnavailable)


@pytest.mark.parametrize("release", ["pulled", "expired"])
@virtual
async def test_drain_waits_for_handed_over_kv(release: str) -> None:
    async with running_worker(drain_timeout_ms=300_000) as worker:
        worker.engine.figures.kv_handles_held = 1
        await worker.submit(work("r1", WorkPhase.PREFILL))
        lasts_ms = 400 if release == "expired" else 60_000
        kv = handle(wall_ms() + lasts_ms)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: worker.log.of(Phase) != [])
        worker.stop.set()
        await until(lambda: worker.membership.states[-1] is MemberState.DRAINING)
        assert worker.task is not None
        assert not worker.task.done()
        if release == "pulled":
            worker.engine.figures.kv_handles_held = 0
        assert await worker.wait_for_exit() is None
        assert release == "pulled" or wall_ms() >= kv.expires_at_ms
