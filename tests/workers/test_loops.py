"""What a worker reads, sends and waits for, with a scripted engine and a log in memory."""

import asyncio
from collections import deque
from dataclasses import replace

import pytest
from aiokafka.errors import KafkaTimeoutError

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
from streams.log.clock import wall_ms
from tests.request_path import named_files, recorded_files
from tests.schemas.examples import TRACEPARENT
from tests.virtual_time import virtual
from tests.waits import until
from tests.workers.fakes import (
    cancel_work,
    handle,
    out,
    work,
)
from tests.workers.running_worker import running_worker

LOOPS = "workers/loops.py"  # also runs for what the worker does beside requests
JOB = "workers/llm/engine.py"  # a dataclass, and the protocol of engines: no code that runs
CLOCK = "streams/log/clock.py"
ENGINE = "workers/llm/vllm/engine.py"  # replaced by the test's engine


async def test_worker_sends_tokens_and_outcome() -> None:
    async with running_worker() as worker:
        order = work()
        await worker.submit(order)
        worker.engine.say(out(ids=[5], text="a"))
        await until(lambda: len(worker.log.of(TokenFrame)) == 1)
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        first, second = worker.log.of(TokenFrame)
        assert (first.ends, second.ends[0].seq) == ([], 2)
        (entry,) = (e for e in worker.log.sends if e[0] == "outcomes")
        _, partition, key, outcome, headers = entry
        assert (key, partition) == (
            "r1.1",
            worker.process._clients.durable.session_partition("s-r1"),
        )
        assert outcome.kind is OutcomeKind.COMPLETED
        assert list(headers) == [("traceparent", TRACEPARENT)]


async def test_worker_sends_one_frame_per_gateway_partition_and_step() -> None:
    async with running_worker(running_max=8) as worker:
        names = [f"r{n}" for n in range(6)]
        orders = [work(name, gateway_partition=n % 2) for n, name in enumerate(names)]
        await worker.submit(*orders)
        worker.engine.say(*(out(f"{name}.1", [7], "x") for name in names))
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)
        frames = [(p, list(f.request_ids)) for t, p, _, f, _ in worker.log.sends if t == "tokens"]
        assert frames == [(0, ["r0", "r2", "r4"]), (1, ["r1", "r3", "r5"])]


async def test_prefill_worker_reports_phase_on_partition_of_session() -> None:
    async with running_worker() as worker:
        await worker.submit(work("r1", WorkPhase.PREFILL))
        kv = handle(wall_ms() + 5_000)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: worker.log.of(Phase) != [])
        (entry,) = (e for e in worker.log.sends if e[0] == "phases")
        assert entry[2] == "s-r1"
        assert entry[3].kind is PhaseKind.PREFILL_DONE
        assert [type(e[3]) for e in worker.log.sends] == [TokenFrame, Phase]


async def test_worker_dead_letters_unreadable_records() -> None:
    async with running_worker() as worker:
        beat = worker.process._clients.codec.encode(cancel_work())[:-1]
        worker.decode.put(b"rubbish")
        worker.decode.put(beat)
        worker.decode.put(Grant(router_id="a", role=Role.DECODE, credits=1))
        await worker.submit(work())
        assert [topic for topic, _ in worker.log.dead_letters] == ["decode.dlq"] * 3
        assert worker.log.dead_letters[0][1] == b"rubbish"


async def test_worker_dead_letters_work_beyond_size_limit() -> None:
    """Its outcome would repeat the long name and could not be written."""
    async with running_worker() as worker:
        foreign = replace(handle(wall_ms() + 5_000), worker_id="x" * 2_000)
        worker.decode.put(work("large", kv=foreign))
        await worker.submit(work())
        assert [topic for topic, _ in worker.log.dead_letters] == ["decode.dlq"]
        assert [job.request_id for job in worker.engine.jobs] == ["r1.1"]


async def test_worker_cancels_request() -> None:
    async with running_worker() as worker:
        await worker.submit(work())
        worker.decode.put(cancel_work())
        await until(lambda: worker.log.of(Outcome) != [])
        assert worker.log.of(Outcome)[0].kind is OutcomeKind.CANCELLED
        assert worker.log.of(TokenFrame)[0].ends[0].kind is OutcomeKind.CANCELLED
        assert worker.engine.aborted == ["r1.1"]


@virtual
async def test_worker_expires_request_without_engine_step() -> None:
    async with running_worker() as worker:
        await worker.submit(work("r1"))
        await worker.submit(work("r2", deadline_ms=wall_ms() + 50))
        await until(lambda: worker.log.of(Outcome) != [])
        (outcome,) = worker.log.of(Outcome)
        assert (outcome.request_id, outcome.kind) == ("r2", OutcomeKind.EXPIRED)
        assert worker.engine.aborted == ["r2.1"]


async def test_outcome_waits_for_acknowledged_frame() -> None:
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.submit(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await until(lambda: worker.log.held_acks["tokens"] != [])
        assert worker.log.of(Outcome) == []
        worker.log.held_acks["tokens"][0].set_result(None)
        await until(lambda: worker.log.of(Outcome) != [])


async def test_last_frame_goes_through_durable_producer() -> None:
    """It must survive the loss of a broker, since no later frame repeats it."""
    async with running_worker() as worker:
        await worker.submit(work())
        worker.engine.say(out(ids=[5], text="a"))
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        by = [
            (producer, bool(record.ends))
            for producer, (_, _, _, record, _) in zip(
                worker.log.sent_by, worker.log.sends, strict=True
            )
            if isinstance(record, TokenFrame)
        ]
    assert by[-1] == ("durable", True)
    assert all(producer == "tokens" for producer, ends in by if not ends)


async def test_prefill_phase_waits_for_acknowledged_tokens() -> None:
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.submit(work("r1", WorkPhase.PREFILL))
        kv = handle(wall_ms() + 5_000)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: worker.log.held_acks["tokens"] != [])
        assert worker.log.of(Phase) == []  # decode goes on after this token: it must not be lost
        worker.log.held_acks["tokens"][0].set_result(None)
        await until(lambda: worker.log.of(Phase) != [])


async def test_worker_merges_tokens_until_frame_is_acknowledged() -> None:
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.submit(work())
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
async def test_worker_paces_frames_except_first_and_last() -> None:
    async with running_worker(running_max=8, frame_interval_ms=200, frame_at_once_max=2) as worker:
        names = [f"r{n}" for n in range(4)]
        await worker.submit(*(work(name) for name in names))
        worker.engine.say(*(out(f"{name}.1", [7], "x") for name in names))
        await until(lambda: len(worker.log.of(TokenFrame)) == 1)
        for _ in range(2):
            worker.engine.say(*(out(f"{name}.1", [8], "y") for name in names))
            await until(lambda: worker.engine.is_heard)
        assert len(worker.log.of(TokenFrame)) == 1
        await worker.submit(work("late"))
        worker.engine.say(out("late.1", [7], "x"))
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)
        assert list(worker.log.of(TokenFrame)[1].texts) == ["x"]
        worker.engine.say(out("r0.1", [9], "z", finish_reason="length"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert list(worker.log.of(TokenFrame)[2].texts) == ["yyz"]  # its end, with all before it
        await until(lambda: len(worker.log.of(TokenFrame)) == 4)  # when the interval is over
        assert list(worker.log.of(TokenFrame)[3].texts) == ["yy"] * 3


@virtual
async def test_worker_flushes_last_tokens_despite_early_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    async with running_worker(running_max=8, frame_interval_ms=100, frame_at_once_max=2) as worker:
        names = [f"r{n}" for n in range(4)]
        await worker.submit(*(work(name) for name in names))
        worker.engine.say(*(out(f"{name}.1", [7], "x") for name in names))
        await until(lambda: len(worker.log.of(TokenFrame)) == 1)
        with monkeypatch.context() as early:
            early.setattr(loop, "call_at", lambda _, ring, *args: loop.call_soon(ring, *args))
            worker.engine.say(*(out(f"{name}.1", [8], "y") for name in names))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await until(lambda: len(worker.log.of(TokenFrame)) == 2)


async def test_worker_restarts_without_outcome_after_lost_frame() -> None:
    async with running_worker() as worker:
        worker.log.errors["tokens"] = deque([KafkaTimeoutError()])
        await worker.submit(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await worker.lives(2)
        assert worker.log.of(Outcome) == []


async def test_worker_sends_no_frame_after_lost_frame() -> None:
    """Later frames would leave a gap, and the last one would complete the answer."""
    async with running_worker() as worker:
        worker.log.held_acks["tokens"] = []
        await worker.submit(work())
        worker.engine.say(out(ids=[5], text="a"))
        await until(lambda: worker.log.held_acks["tokens"] != [])
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.engine.is_heard)
        worker.log.held_acks.pop("tokens")[0].set_exception(KafkaTimeoutError())
        await worker.lives(2)
        assert [list(frame.texts) for frame in worker.log.of(TokenFrame)] == [["a"]]
        assert worker.log.of(Outcome) == []


async def test_worker_retries_failed_report() -> None:
    async with running_worker() as worker:
        worker.log.errors["outcomes"] = deque([KafkaTimeoutError(), KafkaTimeoutError()])
        await worker.submit(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])


@pytest.mark.parametrize("refusing", [True, False])
@virtual
async def test_worker_restarts_after_report_exhausts_tries(
    refusing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(report_tries_max=2) as worker:
        if refusing:
            worker.log.refusing.add("outcomes")
        worker.log.errors["outcomes"] = deque([KafkaTimeoutError()] * 2)
        await worker.submit(work())
        worker.engine.say(out(ids=[5], text="a", finish_reason="stop"))
        await worker.lives(2)
        assert "Outcome of request r1 not sent after 2 tries" in caplog.text


async def test_worker_reads_no_work_while_too_many_reports_are_pending() -> None:
    async with running_worker(reports_pending_max=1) as worker:
        worker.log.held_acks["phases"] = []
        await worker.submit(work())
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


async def test_worker_pauses_while_lease_is_doubtful() -> None:
    """Tokens and work wait until the lease is acknowledged again."""
    async with running_worker() as worker:
        await worker.submit(work())
        worker.membership.valid = False
        worker.engine.say(out(ids=[5], text="a"))
        worker.decode.put(work("r2"))
        await until(lambda: worker.membership.waiting == 2)  # who sends, and who reads
        assert worker.log.sends == []
        assert len(worker.engine.jobs) == 1
        worker.membership.valid = True
        await until(lambda: len(worker.engine.jobs) == 2)
        worker.engine.say(out(ids=[6], text="b", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert [t for frame in worker.log.of(TokenFrame) for t in frame.token_ids] == [5, 6]
        assert len(worker.memberships) == 1


async def test_page_names_every_worker_file_in_call_order() -> None:
    async with running_worker() as worker:
        with recorded_files("workers", "streams", until=lambda: worker.engine.jobs) as files:
            await worker.submit(work())
            await until(lambda: worker.engine.jobs != [])
    first, *page_files, last = named_files("workers")
    assert (first, last) == (LOOPS, ENGINE)
    page_files.remove(JOB)
    ran = [name for name in files if name.startswith("workers/") and name != LOOPS]
    assert page_files == [name for name in page_files if name in ran]
    assert {*files} == {LOOPS, *page_files, CLOCK} and CLOCK in named_files("streams/log")
