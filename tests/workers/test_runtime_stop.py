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
from tests.workers.running_worker import RunningWorker, running_worker
from workers.llm.engine import Engine, EngineLoad


async def test_a_worker_that_lost_its_lease_lives_on_with_its_engine() -> None:
    """It drops what it held, says nothing of it, and serves in a higher epoch (issue 10, 4)."""
    async with running_worker(exchanges_kv=True) as worker:
        first, engine = worker.membership, worker.engine
        assert isinstance(engine, FakeKvEngine)
        await worker.held(work(), work("r2"))
        first.valid = False
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"), out("r2.1", [6], "b"))
        first.lost.set()
        await worker.lives(2)
        again = worker.membership
        assert again is not first and again.epoch > first.epoch
        assert engine.lives == [again.epoch]
        assert worker.log.sent == []
        assert (worker.engine.aborted, worker.engine.closed) == (["r2.1"], False)
        await worker.held(replace(work("r3"), worker_epoch=again.epoch))
        worker.engine.say(out("r2.1", [7], "c"), out("r3.1", [5], "a", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert [o.request_id for o in worker.log.of(Outcome)] == ["r3"]
        assert {r for frame in worker.log.of(TokenFrame) for r in frame.request_ids} == {"r3"}


async def test_what_a_lost_life_has_buffered_is_not_written_later() -> None:
    """It was flushed when the link healed; a drained life has nothing to hide (issue 10, 9)."""
    async with running_worker() as worker:
        worker.membership.lost.set()
        await worker.lives(2)
        assert sorted(worker.log.closed) == [("durable", "discarded"), ("tokens", "discarded")]
        worker.log.closed.clear()
        worker.stop.set()
        assert await worker.ended() is None
        assert sorted(worker.log.closed) == [("durable", "sent"), ("tokens", "sent")]


async def test_a_broker_that_is_away_ends_no_worker() -> None:
    """Each try fails at another place, and the engine stays (issue 10, 4)."""
    async with running_worker() as worker:
        troubles = (BrokerUnavailable("away"), TimeoutError(), LeaseError("no partition is free"))
        for number, trouble in enumerate(troubles, start=2):
            worker.meetings.append(trouble)
            worker.membership.lost.set()
            await worker.lives(number)
        assert worker.meetings == []
        assert not worker.engine.closed


async def test_a_worker_waits_for_its_broker_before_it_starts_its_engine() -> None:
    """A start before the broker is there waits (issue 10, 4)."""
    worker, started = RunningWorker(), list[int]()

    async def start(epoch: int) -> Engine:
        started.append(epoch)
        return cast(Engine, worker.engine)

    worker.log.meetings += [BrokerUnavailable("not there yet"), BrokerUnavailable("not yet")]
    await worker.start(start)
    await worker.ready()
    assert started == [worker.membership.epoch]
    worker.stop.set()
    assert await worker.ended() is None


async def test_doubt_pauses_a_worker_and_does_not_end_it() -> None:
    """Tokens and work wait for the acknowledgement; then all goes on (issue 10, 4)."""
    async with running_worker() as worker:
        await worker.held(work())
        worker.membership.valid = False
        worker.engine.say(out(ids=[5], text="a"))
        worker.decode.put(work("r2"))
        await until(lambda: worker.membership.waiting == 2)  # who sends, and who reads
        assert worker.log.sent == []
        assert len(worker.engine.jobs) == 1
        worker.membership.valid = True
        await until(lambda: len(worker.engine.jobs) == 2)
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert [t for frame in worker.log.of(TokenFrame) for t in frame.token_ids] == [5, 6]
        assert len(worker.memberships) == 1


async def test_a_worker_whose_name_was_taken_ends() -> None:
    async with running_worker() as worker:
        worker.meetings.append(NameTaken("another process took its place"))
        worker.membership.lost.set()
        assert isinstance(await worker.ended(), NameTaken)
        assert worker.engine.closed


@pytest.mark.parametrize("error", [EngineDead("core died"), RuntimeError("adapter bug")])
async def test_a_dead_engine_gives_all_requests_back(error: Exception) -> None:
    async with running_worker() as worker:
        await worker.held(work(), work("r2", WorkPhase.PREFILL))
        worker.engine.die(error)
        assert isinstance(await worker.ended(), EngineDead)
        phases = worker.log.of(Phase)
        assert {p.request_id for p in phases} == {"r1", "r2"}
        assert {p.kind for p in phases} == {PhaseKind.FAILED}
        assert all(p.error.code == "engine_dead" and p.error.retriable for p in phases)
        assert worker.membership.left
        assert worker.engine.closed


async def test_an_engine_that_cannot_tell_its_load_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_worker() as worker:
        await worker.held(work())

        def load() -> EngineLoad:
            raise EngineDead("no answer")

        monkeypatch.setattr(worker.engine, "load", load)
        worker.membership.add_router("router-a")  # asks for a heartbeat
        assert isinstance(await worker.ended(), EngineDead)
        assert [p.error.code for p in worker.log.of(Phase)] == ["engine_dead"]
        assert worker.membership.left


async def test_a_drain_finishes_what_is_held_and_refuses_the_rest() -> None:
    async with running_worker() as worker:
        await worker.held(work())
        worker.stop.set()
        await until(lambda: worker.membership.states[-1] is MemberState.DRAINING)
        worker.decode.put(work("r2"))
        await until(lambda: worker.log.of(Phase) != [])
        assert worker.log.of(Phase)[0].kind is PhaseKind.REFUSED
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        assert await worker.ended() is None
        assert [o.kind for o in worker.log.of(Outcome)] == [OutcomeKind.COMPLETED]
        assert (worker.membership.left, worker.engine.closed, worker.decode.stopped) == (True,) * 3


@virtual
async def test_a_drain_gives_back_what_takes_too_long() -> None:
    async with running_worker(drain_timeout_ms=50) as worker:
        await worker.held(work())
        worker.stop.set()
        assert await worker.ended() is None
        (phase,) = worker.log.of(Phase)
        assert (phase.kind, phase.error.code) == (PhaseKind.FAILED, "worker_refused")
        assert phase.error.retriable
        assert worker.engine.aborted == ["r1.1"]


@virtual
async def test_a_drain_whose_reports_are_not_acknowledged_is_a_failure() -> None:
    async with running_worker(drain_timeout_ms=50) as worker:
        worker.log.held_acks["phases"] = []
        await worker.held(work())
        worker.stop.set()
        assert isinstance(await worker.ended(), BrokerUnavailable)


@pytest.mark.parametrize("gone", ["pulled", "expired"])
@virtual
async def test_a_drain_waits_for_kv_that_was_handed_over(gone: str) -> None:
    async with running_worker(drain_timeout_ms=300_000) as worker:
        worker.engine.figures.kv_handles_held = 1
        await worker.held(work("r1", WorkPhase.PREFILL))
        lasts_ms = 400 if gone == "expired" else 60_000
        kv = handle(wall_ms() + lasts_ms)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: worker.log.of(Phase) != [])
        worker.stop.set()
        await until(lambda: worker.membership.states[-1] is MemberState.DRAINING)
        assert worker.task is not None
        assert not worker.task.done()
        if gone == "pulled":
            worker.engine.figures.kv_handles_held = 0
        assert await worker.ended() is None
        assert gone == "pulled" or wall_ms() >= kv.expires_at_ms
