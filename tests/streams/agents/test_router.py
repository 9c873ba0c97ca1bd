"""The router's agents without a broker: their bodies, the outbox, the gate, the watchdog."""

import asyncio
import functools
from typing import Any

import pytest
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, ConfigError, LeaseError
from schemas.log.clock import wall_ms
from schemas.log.faust import app as faust_app
from schemas.records import (
    DecisionKind,
    Outcome,
    OutcomeKind,
    Reason,
    Request,
    Session,
)
from schemas.rules.sizes import JOURNAL_LINES_MAX
from schemas.settings import LogSettings
from streams.agents import router, watchdog
from streams.agents.app import TOPICS, add_agents, make_app
from streams.agents.gate import Gate
from streams.agents.journal import Journal
from streams.agents.outbox import TRACES_MAX, Lane, Outbox
from streams.agents.records import end_frame
from streams.config import RouterSettings
from streams.core.effects import Decide, Dispatch, End, Forget, SaveSession
from streams.core.events import PartitionTaken, Tick
from streams.core.handlers.dispatch import Dispatcher
from tests.schemas.examples import TRACEPARENT
from tests.streams import builders
from tests.streams.agents.fakes import (
    LOG,
    FakeEvent,
    FakeProducer,
    process_with_partition,
    standing,
)
from tests.streams.builders import T0
from tests.streams.core.router_setups import replicas
from tests.waiting import run, until


def outbox(producer: FakeProducer, pending_max: int = 100) -> Outbox:
    return Outbox(producer, "test.", "router-a", pending_max, standing)  # type: ignore[arg-type]  # a fake


def effects(count: int = 1) -> list[Any]:
    on = replicas(window=count)
    return [effect for number in range(count) for effect in on.request(f"r{number}")]


def test_records_are_acknowledged_in_order_and_only_when_all_is_sent() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box, lane, acked = outbox(producer), Lane(), list[str]()
        task = asyncio.create_task(box.run())
        made = effects(2)
        for name, part in (("first", made[:2]), ("second", made[2:]), ("third", [])):
            box.put(part, lane, lane.open(functools.partial(acked.append, name), len(part)))
        await until(lambda: len(producer.sent) == 4)
        for number in (1, 3, 0):  # all of the second, half of the first
            producer.acks[number].set_result(None)
        await asyncio.sleep(0)
        assert acked == []
        producer.acks[2].set_result(None)
        await box.drain()
        assert acked == ["first", "second", "third"]
        assert [topic for topic, *_ in producer.sent] == ["decisions"] * 2 + ["decode"] * 2
        task.cancel()

    run(main())


def test_a_send_that_fails_ends_the_outbox_and_acknowledges_nothing() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box, lane, acked = outbox(producer), Lane(), list[str]()
        task = asyncio.create_task(box.run())
        made = effects()
        box.put(made, lane, lane.open(lambda: acked.append("r"), len(made)))
        await until(lambda: len(producer.acks) == 2)
        producer.acks[0].set_exception(BrokerUnavailable("gone"))
        producer.acks[1].set_result(None)
        with pytest.raises(BrokerUnavailable, match="gone"):
            await task
        assert acked == []

    run(main())


def test_agents_wait_while_too_much_is_pending() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box = outbox(producer, pending_max=1)
        task = asyncio.create_task(box.run())
        await box.room()
        box.put(effects())
        waiting = asyncio.create_task(box.room())
        await until(lambda: len(producer.acks) == 2)
        assert not waiting.done()
        for ack in producer.acks:
            ack.set_result(None)
        await waiting
        task.cancel()

    run(main())


def test_lanes_that_were_dropped_acknowledge_nothing() -> None:
    lane, acked = Lane(), list[str]()
    receipt = lane.open(lambda: acked.append("r"), 1)
    lane.drop()
    receipt.pending -= 1
    lane.advance()
    assert acked == []


def test_ends_go_to_the_log_and_to_the_gateway() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        outcome = Outcome(
            request_id="r1",
            session_id="s",
            attempt=2,
            kind=OutcomeKind.EXPIRED,
            written_by="router-a",
            ended_ms=T0,
        )
        end = End(outcome, 3, 1)
        task = asyncio.create_task(box.run())
        box.put([end])
        await box.drain()
        (_, first, key, partition, _), (topic, frame, _, gateway, _) = producer.sent
        assert (first, key, partition) == (outcome, "r1.2", 3)
        assert (topic, gateway, frame.worker_id) == ("tokens", 1, "router-a")
        assert frame.ends == end_frame(end, "router-a", T0).ends
        assert (frame.ends[0].attempt, frame.ends[0].seq) == (2, 0)
        Codec().encode(frame)
        task.cancel()

    run(main())


def test_work_carries_the_trace_of_its_request() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        box.trace("r0", (("other", b"x"), ("traceparent", TRACEPARENT)))
        task = asyncio.create_task(box.run())
        box.put(effects())
        await box.drain()
        assert producer.sent[1][4] == [("traceparent", TRACEPARENT)]
        for number in range(TRACES_MAX + 5):
            box.trace(f"t{number}", (("traceparent", TRACEPARENT),))
        assert len(box.traces) == TRACES_MAX
        task.cancel()

    run(main())


def test_sessions_are_saved_once_and_forgotten_with_a_tombstone() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        for turns in (1, 2):
            session = Session(
                session_id="s",
                decode_worker="d",
                worker_epoch=1,
                context_tokens=9,
                turns=turns,
                last_used_ms=T0,
            )
            box.put([SaveSession(session, 1)])
        box.put([Forget("old", 0)])
        await box.drain()
        assert producer.sent == []
        box.save_sessions()
        await box.drain()
        found = [(topic, record, partition) for topic, record, _, partition, _ in producer.sent]
        assert found == [("sessions", session, 1), ("test.sessions", None, 0)]
        task.cancel()

    run(main())


def test_the_gate_opens_turns_away_and_holds_back() -> None:
    async def main() -> None:
        gate = Gate()
        waiting = [asyncio.create_task(gate.passes(p)) for p in (0, 1, 2)]
        await asyncio.sleep(0)
        gate.keep({0, 1})
        gate.open(0)
        assert await waiting[0] and not await waiting[2]
        assert await gate.passes(0)
        gate.close()
        assert not await waiting[1]
        late = asyncio.create_task(gate.passes(0))
        await asyncio.sleep(0)
        assert not late.done()
        gate.open(0)
        assert await late
        gate.open(7)
        assert await gate.passes(7)

    run(main())


def test_the_journal_numbers_its_lines() -> None:
    journal = Journal("router-a")
    assert journal.cut(1) == []
    journal.add("requests", 0, 7, T0)
    journal.add("tick", 0, 0, T0 + 50)
    (first,) = journal.cut(1)
    journal.add("tick", 0, 0, T0 + 100)
    (second,) = journal.cut(1)
    assert first.record is not None and second.record is not None
    assert (first.record.topics, first.record.offsets) == (("requests", "tick"), (7, 0))
    assert (first.record.first_seq, second.record.first_seq) == (0, 2)


def test_a_journal_of_any_length_fits_the_log() -> None:
    """What a router applies when it joins a large fleet leaves in batches (issue 10, 12)."""
    journal, codec = Journal("router-a"), Codec()
    for offset in range(2 * JOURNAL_LINES_MAX + 1):
        journal.add("x" * 249, 2**31 - 1, 2**62 + offset, 2**62)
    batches = [write.record for write in journal.cut(1) if write.record is not None]
    assert [batch.first_seq for batch in batches] == [0, JOURNAL_LINES_MAX, 2 * JOURNAL_LINES_MAX]
    assert max(len(codec.encode(batch)) for batch in batches) < 4 << 20  # half of what fits
    assert sum(len(batch.offsets) for batch in batches) == 2 * JOURNAL_LINES_MAX + 1


def test_each_agent_hands_its_events_to_the_process() -> None:
    async def main() -> None:
        taken: list[tuple[str, bytes]] = []

        class Process:
            async def take(self, topic: str, event: Any) -> None:
                taken.append((topic, event.value))

        app = make_app(LOG, "router-a")
        for topic, agent in zip(TOPICS, add_agents(app, "test.", Process()), strict=True):
            async with agent.test_context() as context:
                await context.put(b"garbage-" + topic.encode())
        assert taken == [(topic, b"garbage-" + topic.encode()) for topic in TOPICS]

    run(main())


async def settings_of(log: LogSettings) -> Any:
    """Faust makes an event loop of its own where none runs."""
    return make_app(log, "router-a").conf


def test_the_app_has_no_web_server_and_never_commits_ahead() -> None:
    conf = run(settings_of(LOG))
    assert conf.id == "test.router"
    assert conf.web_enabled is False
    assert conf.stream_buffer_maxsize == 4_096
    assert conf.consumer_group_instance_id == "router-a"
    assert conf.topic_allow_declare is False


def test_another_faust_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faust_app, "version", lambda name: "9.9.9")
    with pytest.raises(ConfigError, match=r"expected faust-streaming 0\.15\.3, found 9\.9\.9"):
        run(settings_of(LOG))


def test_the_consumer_is_changed_as_meant() -> None:
    async def main() -> None:
        app = make_app(LOG, "router-a")
        thread = app.consumer._thread
        worker = thread._create_worker_consumer(app.transport)
        assert worker._fetch_max_wait_ms == faust_app.FETCH_MAX_WAIT_MS
        assert worker._partition_assignment_strategy == (RangePartitionAssignor,)
        await worker.stop()

    run(main())


def test_security_settings_reach_faust() -> None:
    sasl = LogSettings(
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="u",
        sasl_password="p",
    )
    credentials = run(settings_of(sasl)).broker_credentials
    assert str(credentials.mechanism.value) == "SCRAM-SHA-512"
    tls = LogSettings(security_protocol="SSL")
    assert run(settings_of(tls)).broker_credentials is not None


def test_garbage_is_buried_before_it_is_acknowledged() -> None:
    async def main() -> None:
        process, producer = await process_with_partition()
        producer.at_once = False
        event = FakeEvent(b"garbage", headers={"h": b"v"})
        taking = asyncio.create_task(process.take("requests", event))
        await until(lambda: len(producer.acks) == 1)
        assert event.acks == []
        producer.acks[0].set_result(None)
        await taking
        assert event.acks == [0]
        topic, value, _, _, headers = producer.sent[0]
        assert (topic, value) == ("test.requests.dlq", b"garbage")
        assert ("h", b"v") in headers

    run(main())


def test_a_record_that_was_rebuilt_is_acknowledged_and_not_applied_again() -> None:
    async def main() -> None:
        process, _ = await process_with_partition()
        process.seen["requests", 0] = 5
        deadline_ms = wall_ms() + 60_000
        value = process.codec.encode(builders.request("r1", deadline_ms=deadline_ms))
        old, fresh = FakeEvent(value, offset=4), FakeEvent(value, offset=5)
        await process.take("requests", old)
        assert old.acks == [4] and not process.router.view()
        await process.take("requests", fresh)
        assert fresh.acks == [5] and process.router.view()
        assert process.seen["requests", 0] == 6

    run(main())


def test_a_bug_in_the_core_ends_the_process_and_acknowledges_nothing() -> None:
    async def main() -> None:
        process, _ = await process_with_partition()

        def broken(event: object, now_ms: int) -> list[Any]:
            raise AssertionError("a bug")

        process.router.apply = broken  # type: ignore[method-assign]  # breaks it on purpose
        event = FakeEvent(process.codec.encode(builders.request("r1")))
        taking = asyncio.create_task(process.take("requests", event))
        with pytest.raises(AssertionError, match="a bug"):
            await process.failure()
        assert not event.acks and not taking.done()
        taking.cancel()
        process.router.apply = lambda *_: pytest.fail("asked")  # type: ignore[method-assign]
        assert process.apply(Tick(), "tick", 0, 0) == []  # it is asked nothing more
        await process.take("requests", event)
        assert not event.acks

    run(main())


def test_a_failing_core_leaves_a_note_of_the_request_it_was_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        process, producer = await process_with_partition()

        def broken(*_: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(Dispatcher, "dispatch_waiting", broken)
        request = builders.request("r1", deadline_ms=wall_ms() + 60_000)
        taking = asyncio.create_task(
            process.take("requests", FakeEvent(process.codec.encode(request)))
        )
        with pytest.raises(AssertionError, match="a bug"):
            await process.failure()
        taking.cancel()
        sending = asyncio.create_task(process.outbox.run())
        await process.outbox.drain()
        (topic, decision, *_), *_ = producer.sent
        assert (topic, decision.request_id) == ("decisions", "r1")
        assert (decision.kind, decision.reason) == (
            DecisionKind.FAIL,
            Reason.ROUTER_RESTARTED,
        )
        sending.cancel()

    run(main())


def test_time_never_runs_backwards() -> None:
    async def main() -> None:
        process, _ = await process_with_partition()
        later = process._now_ms + 1_000
        process.apply(PartitionTaken(1), "taken", 1, 0, later)
        process.apply(PartitionTaken(2), "taken", 2, 0, later - 500)
        (batch,) = process.journal.cut(1)
        assert batch.record is not None
        assert list(batch.record.now_ms) == sorted(batch.record.now_ms)

    run(main())


def test_a_router_begins_anew_where_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time would stand until then, and every request expire (issue 10, 10)."""

    async def main() -> None:
        process, _ = await process_with_partition()
        monkeypatch.setattr(router, "wall_ms", lambda: process._now_ms - 60_000)
        with pytest.raises(LeaseError, match="router-a: the clock was set back"):
            await process.tick()

    run(main())


def test_a_consumer_that_reads_nothing_in_spite_of_lag_ends_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        class Asking:
            async def end_offsets(self, tps: list[Any]) -> dict[Any, int]:
                return dict.fromkeys(tps, 3)

            async def __aenter__(self) -> "Asking":
                return self

            async def __aexit__(self, *_: object) -> None:
                return None

        monkeypatch.setattr(watchdog, "asking_client", lambda log: Asking())
        process, _ = await process_with_partition()
        process.seen = {(topic, 0): 3 for topic in TOPICS}
        settings = RouterSettings(stall_exit_ms=50)
        watch = asyncio.create_task(watchdog.watch_progress(LOG, settings, process))
        await asyncio.wait([watch], timeout=0.2)
        assert not watch.done()  # nothing to read
        process.seen["requests", 0] = 1
        for _ in range(9):  # a rebuild, whose end is far away (issue 10, 5)
            process.records_read += 1
            await asyncio.wait([watch], timeout=0.02)
        assert not watch.done()
        with pytest.raises(BrokerUnavailable, match=r"2 records to read on partitions \[0\]"):
            await watch

    run(main())


def test_records_of_the_core_encode() -> None:
    codec = Codec()
    for effect in effects(2):
        assert isinstance(effect, Decide | Dispatch)
        record: Any = effect.decision if isinstance(effect, Decide) else effect.record
        assert codec.decode(codec.encode(record)) == record
    assert isinstance(codec.decode(codec.encode(builders.request("r1"))), Request)
