"""What the fleet learns of a worker, and its engine of the fleet."""

from typing import cast

from schemas.records import (
    Role,
)
from tests.waits import until
from tests.workers.fakes import (
    FakeKvEngine,
    work,
)
from tests.workers.running_worker import RunningWorker, running_worker
from workers.llm.engine import Engine, EngineLoad


async def test_presence_divides_credits_when_router_joins() -> None:
    async with running_worker(running_max=5, prefill_credits=3) as worker:
        worker.membership.add_router("router-b")
        await until(lambda: worker.membership.beats[-1] != [])
        worker.membership.add_router("router-a")
        await until(lambda: len(worker.membership.beats[-1]) == 4)
        shares = {(g.router_id, g.role): g.credits for g in worker.membership.beats[-1]}
        assert shares == {
            ("router-a", Role.PREFILL): 2,
            ("router-b", Role.PREFILL): 1,
            ("router-a", Role.DECODE): 3,
            ("router-b", Role.DECODE): 2,
        }


async def test_presence_reports_engine_load_with_token_rate() -> None:
    async with running_worker() as worker:
        presence = worker.membership.load_source.__self__
        times = iter([10.0, 12.0, 14.0, 20.0])
        presence._clock_s = lambda: next(times)
        presence._samples.clear()
        await worker.submit(work())
        worker.engine.figures = EngineLoad(running=1, waiting=2, tokens_total=100, step_ms=5.0)
        worker.engine.figures.adapters = ("ada",)
        assert presence.load().tokens_per_s == 0
        worker.engine.figures.tokens_total = 300
        load = presence.load()
        assert (load.tokens_per_s, load.running, load.waiting) == (100, 1, 2)
        assert (load.requests_total, load.tokens_total, load.step_ms) == (1, 300, 5.0)
        assert load.adapters == ("ada",)
        worker.engine.figures.tokens_total = 700
        assert presence.load().tokens_per_s == 150
        assert presence.load().tokens_per_s == 0  # nothing for a whole window


async def test_presence_gives_engine_metadata_of_peers() -> None:
    worker = RunningWorker()
    worker.engine = engine = FakeKvEngine()

    async def start(epoch: int) -> Engine:
        worker.membership.add_worker("w2", 3, b"card")
        return cast(Engine, worker.engine)

    await worker.start(start)
    await worker.ready()
    worker.membership.add_worker("w3", 4, b"other card")
    (peer_metadata,) = engine.lookups
    assert (peer_metadata("e-w2"), peer_metadata("e-w3")) == (b"card", b"other card")
    assert peer_metadata("e-w9") is None
    assert engine.observed_workers == [("w2", 3, "e-w2"), ("w3", 4, "e-w3")]
    worker.stop.set()
    assert await worker.wait_for_exit() is None
