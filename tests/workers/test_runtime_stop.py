"""How a worker ends: fenced, with a dead engine, or drained."""

import pytest

from schemas.errors import (
    BrokerUnavailable,
    EngineDead,
    LeaseError,
)
from schemas.log.clock import wall_ms
from schemas.records import (
    MemberState,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    WorkPhase,
)
from tests.virtual import virtual
from tests.waiting import until
from tests.workers.fakes import (
    handle,
    out,
    work,
)
from tests.workers.life import life
from workers.llm.engine import EngineLoad


async def test_a_fenced_worker_says_nothing_and_ends() -> None:
    async with life() as found:
        await found.held(work(), work("r2"))
        found.membership.valid = False
        found.engine.say(out(ids=[5], text="a", finish_reason="stop"), out("r2.1", [6], "b"))
        assert isinstance(await found.ended(), LeaseError)
        assert found.log.sent == []
        assert found.engine.aborted == ["r2.1"]
        assert found.engine.closed


async def test_a_fenced_worker_reports_no_phase() -> None:
    async with life() as found:
        await found.held(work())
        found.membership.valid = False
        found.engine.say(out(finish_reason="abort"))
        assert isinstance(await found.ended(), LeaseError)
        assert found.log.sent == []


async def test_a_lost_lease_ends_the_worker() -> None:
    async with life() as found:
        await found.held(work())
        found.membership.lost.set()
        assert isinstance(await found.ended(), LeaseError)
        assert (found.engine.aborted, found.log.sent) == (["r1.1"], [])


@pytest.mark.parametrize("error", [EngineDead("core died"), RuntimeError("adapter bug")])
async def test_a_dead_engine_gives_all_requests_back(error: Exception) -> None:
    async with life() as found:
        await found.held(work(), work("r2", WorkPhase.PREFILL))
        found.engine.die(error)
        assert isinstance(await found.ended(), EngineDead)
        phases = found.log.of(Phase)
        assert {p.request_id for p in phases} == {"r1", "r2"}
        assert {p.kind for p in phases} == {PhaseKind.FAILED}
        assert all(p.error.code == "engine_dead" and p.error.retriable for p in phases)
        assert found.membership.left
        assert found.engine.closed


async def test_an_engine_that_cannot_tell_its_load_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with life() as found:
        await found.held(work())

        def load() -> EngineLoad:
            raise EngineDead("no answer")

        monkeypatch.setattr(found.engine, "load", load)
        found.membership.add_router("router-a")  # asks for a heartbeat
        assert isinstance(await found.ended(), EngineDead)
        assert [p.error.code for p in found.log.of(Phase)] == ["engine_dead"]
        assert found.membership.left


async def test_a_drain_finishes_what_is_held_and_refuses_the_rest() -> None:
    async with life() as found:
        await found.held(work())
        found.stop.set()
        await until(lambda: found.membership.states[-1] is MemberState.DRAINING)
        found.decode.put(work("r2"))
        await until(lambda: found.log.of(Phase) != [])
        assert found.log.of(Phase)[0].kind is PhaseKind.REFUSED
        found.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        assert await found.ended() is None
        assert [o.kind for o in found.log.of(Outcome)] == [OutcomeKind.COMPLETED]
        assert (found.membership.left, found.engine.closed, found.decode.stopped) == (True,) * 3


@virtual
async def test_a_drain_gives_back_what_takes_too_long() -> None:
    async with life(drain_timeout_ms=50) as found:
        await found.held(work())
        found.stop.set()
        assert await found.ended() is None
        (phase,) = found.log.of(Phase)
        assert (phase.kind, phase.error.code) == (PhaseKind.FAILED, "worker_refused")
        assert phase.error.retriable
        assert found.engine.aborted == ["r1.1"]


@virtual
async def test_a_drain_whose_reports_are_not_acknowledged_is_a_failure() -> None:
    async with life(drain_timeout_ms=50) as found:
        found.log.held_acks["phases"] = []
        await found.held(work())
        found.stop.set()
        assert isinstance(await found.ended(), BrokerUnavailable)


@pytest.mark.parametrize("gone", ["pulled", "expired"])
@virtual
async def test_a_drain_waits_for_kv_that_was_handed_over(gone: str) -> None:
    async with life(drain_timeout_ms=300_000) as found:
        found.engine.figures.extra["held"] = 1
        await found.held(work("r1", WorkPhase.PREFILL))
        lasts_ms = 400 if gone == "expired" else 60_000
        kv = handle(wall_ms() + lasts_ms)
        found.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: found.log.of(Phase) != [])
        found.stop.set()
        await until(lambda: found.membership.states[-1] is MemberState.DRAINING)
        assert found.task is not None
        assert not found.task.done()
        if gone == "pulled":
            found.engine.figures.extra["held"] = 0
        assert await found.ended() is None
        assert gone == "pulled" or wall_ms() >= kv.expires_at_ms
