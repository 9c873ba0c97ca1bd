"""What a worker reads, sends and waits for, with a scripted engine and a log in memory."""

import asyncio
from collections import deque
from dataclasses import replace

import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas.log.clock import wall_ms
from schemas.records import (
    Grant,
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
    cancel_work,
    handle,
    out,
    work,
)
from tests.workers.running_worker import running_worker


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
    """Its outcome would repeat the name, and could not be written."""
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
    """It must not vanish with a broker, for nobody would say it again."""
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


async def test_nothing_follows_a_frame_that_is_not_written() -> None:
    """What waits would leave a gap, and its end would call the answer whole."""
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a"))
        await until(lambda: worker.log.held_acks["tokens"] != [])
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.engine.is_heard)
        worker.log.held_acks.pop("tokens")[0].set_exception(KafkaTimeoutError())
        await worker.lives(2)
        assert [list(frame.texts) for frame in worker.log.of(TokenFrame)] == [["a"]]
        assert worker.log.of(Outcome) == []


async def test_a_report_that_fails_is_sent_again() -> None:
    async with running_worker() as worker:
        worker.log.errors["outcomes"] = deque([KafkaTimeoutError(), KafkaTimeoutError()])
        await worker.held(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])


@pytest.mark.parametrize("refusing", [True, False])
@virtual
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


async def test_doubt_pauses_a_worker_and_does_not_end_it() -> None:
    """Tokens and work wait for the acknowledgement; then all goes on."""
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
