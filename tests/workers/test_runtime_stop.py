"""How a life of a worker ends, fenced, with a dead engine, or drained, and what begins then."""

from dataclasses import replace
from typing import cast

import pytest

from schemas.errors import (
    BrokerUnavailable,
    EngineDead,
    LeaseError,
    NameTaken,
)
from schemas.log.clock import wall_ms
from schemas.records import (
    MemberState,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    TokenFrame,
    WorkPhase,
)
from tests.virtual import virtual
from tests.waiting import until
from tests.workers.fakes import (
    FakeKvEngine,
    handle,
    out,
    work,
)
from tests.workers.running_worker import Life, life
from workers.llm.engine import Engine, EngineLoad


async def test_a_worker_that_lost_its_lease_lives_on_with_its_engine() -> None:
    """It drops what it held, says nothing of it, and serves in a higher epoch (issue 10, 4)."""
    async with life(exchanges_kv=True) as found:
        first, engine = found.membership, found.engine
        assert isinstance(engine, FakeKvEngine)
        await found.held(work(), work("r2"))
        first.valid = False
        found.engine.say(out(ids=[5], text="a", finish_reason="stop"), out("r2.1", [6], "b"))
        first.lost.set()
        await found.lives(2)
        again = found.membership
        assert again is not first and again.epoch > first.epoch
        assert engine.lives == [again.epoch]
        assert found.log.sent == []
        assert (found.engine.aborted, found.engine.closed) == (["r2.1"], False)
        await found.held(replace(work("r3"), worker_epoch=again.epoch))
        found.engine.say(out("r2.1", [7], "c"), out("r3.1", [5], "a", finish_reason="stop"))
        await until(lambda: found.log.of(Outcome) != [])
        assert [o.request_id for o in found.log.of(Outcome)] == ["r3"]
        assert {r for frame in found.log.of(TokenFrame) for r in frame.request_ids} == {"r3"}


async def test_what_a_lost_life_has_buffered_is_not_written_later() -> None:
    """It was flushed when the link healed; a drained life has nothing to hide (issue 10, 9)."""
    async with life() as found:
        found.membership.lost.set()
        await found.lives(2)
        assert sorted(found.log.closed) == [("durable", "discarded"), ("tokens", "discarded")]
        found.log.closed.clear()
        found.stop.set()
        assert await found.ended() is None
        assert sorted(found.log.closed) == [("durable", "sent"), ("tokens", "sent")]


async def test_a_broker_that_is_away_ends_no_worker() -> None:
    """Each try fails at another place, and the engine stays (issue 10, 4)."""
    async with life() as found:
        troubles = (BrokerUnavailable("away"), TimeoutError(), LeaseError("no partition is free"))
        for number, trouble in enumerate(troubles, start=2):
            found.meetings.append(trouble)
            found.membership.lost.set()
            await found.lives(number)
        assert found.meetings == []
        assert not found.engine.closed


async def test_a_worker_waits_for_its_broker_before_it_starts_its_engine() -> None:
    """A start before the broker is there waits (issue 10, 4)."""
    found, started = Life(), list[int]()

    async def start(epoch: int) -> Engine:
        started.append(epoch)
        return cast(Engine, found.engine)

    found.log.meetings += [BrokerUnavailable("not there yet"), BrokerUnavailable("not yet")]
    await found.start(start)
    await found.ready()
    assert started == [found.membership.epoch]
    found.stop.set()
    assert await found.ended() is None


async def test_doubt_pauses_a_worker_and_does_not_end_it() -> None:
    """Tokens and work wait for the acknowledgement; then all goes on (issue 10, 4)."""
    async with life() as found:
        await found.held(work())
        found.membership.valid = False
        found.engine.say(out(ids=[5], text="a"))
        found.decode.put(work("r2"))
        await until(lambda: found.membership.waiting == 2)  # who sends, and who reads
        assert found.log.sent == []
        assert len(found.engine.jobs) == 1
        found.membership.valid = True
        await until(lambda: len(found.engine.jobs) == 2)
        found.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: found.log.of(Outcome) != [])
        assert [t for frame in found.log.of(TokenFrame) for t in frame.token_ids] == [5, 6]
        assert len(found.memberships) == 1


async def test_a_worker_whose_name_was_taken_ends() -> None:
    async with life() as found:
        found.meetings.append(NameTaken("another process took its place"))
        found.membership.lost.set()
        assert isinstance(await found.ended(), NameTaken)
        assert found.engine.closed


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
        found.engine.figures.kv_handles_held = 1
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
            found.engine.figures.kv_handles_held = 0
        assert await found.ended() is None
        assert gone == "pulled" or wall_ms() >= kv.expires_at_ms
