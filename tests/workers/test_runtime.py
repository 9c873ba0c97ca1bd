"""The life of a worker with a scripted engine and a log in memory."""

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any, cast

import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas.errors import (
    ConfigError,
)
from schemas.log.clock import wall_ms
from schemas.records import (
    Grant,
    MemberState,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    TokenFrame,
    WorkPhase,
)
from tests.schemas.examples import TRACEPARENT
from tests.virtual import virtual
from tests.waiting import until
from tests.workers.fakes import (
    FakeKvEngine,
    cancel_work,
    handle,
    out,
    work,
)
from tests.workers.running_worker import RunningWorker, running_worker
from workers.config import WorkerSettings, engine_start
from workers.llm.engine import Engine, EngineLoad


async def test_it_joins_when_its_engine_is_up() -> None:
    worker, starts, may_start = RunningWorker(), asyncio.Event(), asyncio.Event()

    async def start(epoch: int) -> Engine:
        assert epoch == worker.membership.epoch
        starts.set()
        await may_start.wait()
        return worker.engine

    await worker.start(start)
    await starts.wait()
    assert worker.membership.met
    assert not worker.membership.beats  # a start that takes long cannot lose a lease
    assert not worker.log.readers
    may_start.set()
    await worker.ready()
    await until(lambda: len(worker.membership.beats) > 1)
    assert worker.membership.published == worker.engine.capability
    assert (worker.log.readers["prefill"].partition, worker.decode.partition) == (1, 2)
    assert worker.decode.started_at == "latest"
    worker.stop.set()
    assert await worker.ended() is None
    assert worker.engine.closed


async def test_an_engine_that_does_not_start_ends_the_worker() -> None:
    worker = RunningWorker()

    async def start(epoch: int) -> Engine:
        raise ConfigError("no such model")

    await worker.start(start)
    assert isinstance(await worker.ended(), ConfigError)
    assert worker.membership.left


async def test_it_can_be_stopped_while_its_engine_starts() -> None:
    worker, starts = RunningWorker(), asyncio.Event()

    async def start(epoch: int) -> Engine:
        starts.set()
        await asyncio.Event().wait()
        raise AssertionError

    await worker.start(start)
    await starts.wait()
    worker.stop.set()
    assert await worker.ended() is None
    assert worker.membership.left


async def test_a_fleet_without_room_is_waited_for_with_the_engine() -> None:
    """The cause lies outside the worker, so it never gives up (issue 10, 4)."""
    worker = RunningWorker()
    worker.log.full.add("decode")
    await worker.start()
    await until(lambda: len(worker.memberships) > 1)
    assert not worker.engine.closed
    worker.log.full.clear()
    await worker.ready()
    worker.stop.set()
    assert await worker.ended() is None
    assert worker.engine.closed


async def test_tokens_and_outcome_of_a_request() -> None:
    async with running_worker() as worker:
        order = work()
        await worker.held(order)
        worker.engine.say(out(ids=[5], text="a"))
        await until(lambda: len(worker.log.of(TokenFrame)) == 1)
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        first, second = worker.log.of(TokenFrame)
        assert (first.ends, second.ends[0].seq) == ([], 2)
        (entry,) = (e for e in worker.log.sent if e[0] == "outcomes")
        _, partition, key, outcome, headers = entry
        assert (key, partition) == (
            "r1.1",
            worker.process._clients.durable.session_partition("s-r1"),
        )
        assert outcome.kind is OutcomeKind.COMPLETED
        assert list(headers) == [("traceparent", TRACEPARENT)]


async def test_one_frame_per_gateway_partition_and_step() -> None:
    async with running_worker(running_max=8) as worker:
        names = [f"r{n}" for n in range(6)]
        orders = [work(name, gateway_partition=n % 2) for n, name in enumerate(names)]
        await worker.held(*orders)
        worker.engine.say(*(out(f"{name}.1", [7], "x") for name in names))
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)
        sent = [(p, list(f.request_ids)) for t, p, _, f, _ in worker.log.sent if t == "tokens"]
        assert sent == [(0, ["r0", "r2", "r4"]), (1, ["r1", "r3", "r5"])]


async def test_prefill_reports_a_phase_on_its_sessions_partition() -> None:
    async with running_worker() as worker:
        await worker.held(work("r1", WorkPhase.PREFILL))
        kv = handle(wall_ms() + 5_000)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: worker.log.of(Phase) != [])
        (entry,) = (e for e in worker.log.sent if e[0] == "phases")
        assert entry[2] == "s-r1"
        assert entry[3].kind is PhaseKind.PREFILL_DONE
        assert [type(e[3]) for e in worker.log.sent] == [TokenFrame, Phase]


async def test_a_record_that_cannot_be_read_is_buried_and_work_goes_on() -> None:
    async with running_worker() as worker:
        beat = worker.process._clients.codec.encode(cancel_work())[:-1]
        worker.decode.put(b"rubbish")
        worker.decode.put(beat)
        worker.decode.put(Grant(router_id="a", role=Role.DECODE, credits=1))
        await worker.held(work())
        assert [topic for topic, _ in worker.log.buried] == ["decode.dlq"] * 3
        assert worker.log.buried[0][1] == b"rubbish"


async def test_work_that_breaks_the_size_rule_is_buried() -> None:
    """Its outcome would repeat the name, and could not be written (issue 10, 15 and 24)."""
    async with running_worker() as worker:
        foreign = replace(handle(wall_ms() + 5_000), worker_id="x" * 2_000)
        worker.decode.put(work("large", kv=foreign))
        await worker.held(work())
        assert [topic for topic, _ in worker.log.buried] == ["decode.dlq"]
        assert [job.request_id for job in worker.engine.jobs] == ["r1.1"]


async def test_a_cancellation_ends_the_request() -> None:
    async with running_worker() as worker:
        await worker.held(work())
        worker.decode.put(cancel_work())
        await until(lambda: worker.log.of(Outcome) != [])
        assert worker.log.of(Outcome)[0].kind is OutcomeKind.CANCELLED
        assert worker.log.of(TokenFrame)[0].ends[0].kind is OutcomeKind.CANCELLED
        assert worker.engine.aborted == ["r1.1"]


@virtual
async def test_a_deadline_ends_the_request_without_an_engine_step() -> None:
    async with running_worker() as worker:
        await worker.held(work("r1"))
        await worker.held(work("r2", deadline_ms=wall_ms() + 50))
        await until(lambda: worker.log.of(Outcome) != [])
        (outcome,) = worker.log.of(Outcome)
        assert (outcome.request_id, outcome.kind) == ("r2", OutcomeKind.EXPIRED)
        assert worker.engine.aborted == ["r2.1"]


async def test_an_outcome_waits_for_its_frame() -> None:
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await until(lambda: worker.log.held_acks["tokens"] != [])
        assert worker.log.of(Outcome) == []
        worker.log.held_acks["tokens"][0].set_result(None)
        await until(lambda: worker.log.of(Outcome) != [])


async def test_a_frame_with_an_end_waits_for_every_replica() -> None:
    """It must not vanish with a broker, for nobody would say it again (issue 10, 13)."""
    async with running_worker() as worker:
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a"))
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        by = [
            (producer, bool(record.ends))
            for producer, (_, _, _, record, _) in zip(
                worker.log.sent_by, worker.log.sent, strict=True
            )
            if isinstance(record, TokenFrame)
        ]
    assert by[-1] == ("durable", True)
    assert all(producer == "tokens" for producer, ends in by if not ends)


async def test_a_hand_over_waits_for_its_tokens() -> None:
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.held(work("r1", WorkPhase.PREFILL))
        kv = handle(wall_ms() + 5_000)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: worker.log.held_acks["tokens"] != [])
        assert worker.log.of(Phase) == []  # decode goes on after this token: it must not be lost
        worker.log.held_acks["tokens"][0].set_result(None)
        await until(lambda: worker.log.of(Phase) != [])


async def test_tokens_come_together_while_the_last_frame_is_not_acknowledged() -> None:
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.held(work())
        for token, text in enumerate("abcd"):
            worker.engine.say(out(ids=[token], text=text))
            await until(lambda: worker.engine.is_heard)
        assert [list(frame.texts) for frame in worker.log.of(TokenFrame)] == [["a"]]
        worker.log.held_acks["tokens"][0].set_result(None)
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)
        later = worker.log.of(TokenFrame)[1]
        assert (list(later.texts), list(later.first_seqs)) == (["bcd"], [1])
        worker.log.held_acks["tokens"][1].set_result(None)


@virtual
async def test_frames_of_many_streams_keep_their_interval_but_first_and_last_do_not_wait() -> None:
    async with running_worker(running_max=8, frame_interval_ms=200, frame_at_once_max=2) as worker:
        names = [f"r{n}" for n in range(4)]
        await worker.held(*(work(name) for name in names))
        worker.engine.say(*(out(f"{name}.1", [7], "x") for name in names))
        await until(lambda: len(worker.log.of(TokenFrame)) == 1)
        for _ in range(2):
            worker.engine.say(*(out(f"{name}.1", [8], "y") for name in names))
            await until(lambda: worker.engine.is_heard)
        assert len(worker.log.of(TokenFrame)) == 1
        await worker.held(work("late"))
        worker.engine.say(out("late.1", [7], "x"))
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)
        assert list(worker.log.of(TokenFrame)[1].texts) == ["x"]
        worker.engine.say(out("r0.1", [9], "z", finish_reason="length"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert list(worker.log.of(TokenFrame)[2].texts) == ["yyz"]  # its end, with all before it
        await until(lambda: len(worker.log.of(TokenFrame)) == 4)  # when the interval is over
        assert list(worker.log.of(TokenFrame)[3].texts) == ["yy"] * 3


@virtual
async def test_the_last_tokens_of_many_streams_leave_although_the_timer_is_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    async with running_worker(running_max=8, frame_interval_ms=100, frame_at_once_max=2) as worker:
        names = [f"r{n}" for n in range(4)]
        await worker.held(*(work(name) for name in names))
        worker.engine.say(*(out(f"{name}.1", [7], "x") for name in names))
        await until(lambda: len(worker.log.of(TokenFrame)) == 1)
        with monkeypatch.context() as early:
            early.setattr(loop, "call_at", lambda _, ring, *args: loop.call_soon(ring, *args))
            worker.engine.say(*(out(f"{name}.1", [8], "y") for name in names))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)


async def test_a_frame_that_is_not_written_ends_the_life_without_an_outcome() -> None:
    async with running_worker() as worker:
        worker.log.errors["tokens"] = deque([KafkaTimeoutError()])
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await worker.lives(2)
        assert worker.log.of(Outcome) == []


async def test_a_report_that_fails_is_sent_again() -> None:
    async with running_worker() as worker:
        worker.log.errors["outcomes"] = deque([KafkaTimeoutError(), KafkaTimeoutError()])
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])


@pytest.mark.parametrize("refusing", [True, False])
async def test_a_report_that_never_gets_through_ends_the_life(
    refusing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(report_tries_max=2) as worker:
        if refusing:
            worker.log.refusing.add("outcomes")
        worker.log.errors["outcomes"] = deque([KafkaTimeoutError()] * 2)
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await worker.lives(2)
        assert "Outcome of request r1 not sent after 2 tries" in caplog.text


async def test_no_work_is_taken_while_too_many_reports_are_pending() -> None:
    async with running_worker(reports_pending_max=1) as worker:
        worker.log.held_acks["phases"] = []
        await worker.held(work())
        worker.engine.say(out(finish_reason="abort"))
        await until(lambda: worker.log.held_acks["phases"] != [])
        worker.decode.put(work("r2"))  # is read, since the reader waits for records already
        await until(lambda: len(worker.engine.jobs) == 2)
        worker.decode.put(work("r3"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(worker.engine.jobs) == 2
        worker.log.held_acks["phases"].pop().set_result(None)
        await until(lambda: len(worker.engine.jobs) == 3)


async def test_routers_share_the_capacity_and_a_new_one_hears_at_once() -> None:
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


async def test_its_load_is_the_engines_with_a_rate() -> None:
    async with running_worker() as worker:
        presence = worker.membership.load_source.__self__
        times = iter([10.0, 12.0, 14.0, 20.0])
        presence._clock_s = lambda: next(times)
        presence._samples.clear()
        await worker.held(work())
        worker.engine.figures = EngineLoad(running=1, waiting=2, tokens_total=100, step_ms=5.0)
        assert presence.load().tokens_per_s == 0
        worker.engine.figures.tokens_total = 300
        load = presence.load()
        assert (load.tokens_per_s, load.running, load.waiting) == (100, 1, 2)
        assert (load.requests_total, load.tokens_total, load.step_ms) == (1, 300, 5.0)
        worker.engine.figures.tokens_total = 700
        assert presence.load().tokens_per_s == 150
        assert presence.load().tokens_per_s == 0  # nothing for a whole window


async def test_an_engine_that_exchanges_kv_learns_its_peers() -> None:
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
    assert engine.seen == [("w2", 3, "e-w2"), ("w3", 4, "e-w3")]
    worker.stop.set()
    assert await worker.ended() is None


async def test_an_idle_worker_takes_no_turns_of_its_own() -> None:
    async with running_worker() as worker:
        turns = 0
        loop: Any = asyncio.get_running_loop()
        run_once = loop._run_once

        def counted() -> None:
            nonlocal turns
            turns += 1
            run_once()

        loop._run_once = counted
        done = asyncio.Event()
        loop.call_later(0.3, done.set)
        await done.wait()
        del loop._run_once
        assert worker.membership.states[-1] is MemberState.READY
        assert turns <= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "tpu"}, "worker.engine: expected sim or vllm, found 'tpu'"),
        ({"seen_max": 0}, "worker.seen_max: expected at least 1, found 0"),
        ({"decode_credits": -1}, "worker.decode_credits: expected at least 0, found -1"),
    ],
)
def test_settings_that_stop_the_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerSettings(**changes)


def test_engines_start_by_name() -> None:
    pytest.importorskip("workers.llm.sim.engine", reason="the sim engine is missing")
    assert callable(engine_start("sim"))
