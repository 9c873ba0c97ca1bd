"""What a router writes, in which order, and what it acknowledges when."""

import asyncio
import functools
from typing import Any

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.records import (
    AssignRoles,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Request,
    Role,
    Session,
    WarmPrefix,
    Work,
)
from streams.agents.outbox import TRACES_MAX, Outbox, end_frame
from streams.core.effects import (
    Decide,
    Dispatch,
    DropSession,
    Effect,
    End,
    LendRole,
    NotifyRetrieval,
    RecordUsage,
    SaveSession,
    SkipRetrieval,
    StartRetrieval,
    WarmCache,
)
from streams.core.events import PhaseArrived, Tick
from streams.log.clients import Ack
from streams.log.faust.group import Receipts
from tests.schemas.examples import TRACEPARENT, example
from tests.streams import builders
from tests.streams.agents.fakes import (
    FakeProducer,
    standing,
)
from tests.streams.builders import T0
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import replicas
from tests.waits import run, until

PLACE = ("requests", 0)
searches: list[StartRetrieval] = []


def use(effect: RecordUsage, outcome: Ack | None) -> Ack:
    """What has been used is written at once."""
    ack: Ack = asyncio.get_running_loop().create_future()
    ack.set_result(None)
    return ack


class SmallProducer(FakeProducer):
    """Takes no work: by itself, or by the word of its broker."""

    def __init__(self, *, by_broker: bool, kind: type = Work) -> None:
        super().__init__()
        self.by_broker, self.kind = by_broker, kind

    async def send(self, topic: str, record: Any, **options: Any) -> asyncio.Future[None]:
        if not isinstance(record, self.kind):
            return await super().send(topic, record, **options)
        if not self.by_broker:
            raise RecordTooLarge("decode[0]: not sent")
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ack.set_exception(MessageSizeTooLargeError("too large"))
        return ack


def outbox(producer: Any, pending_max: int = 100) -> Outbox:
    return Outbox(producer, "test.", "router-a", pending_max, standing, searches.append, use)


def effects(count: int = 1) -> list[Any]:
    on = replicas(window=count)
    return [effect for number in range(count) for effect in on.request(f"r{number}")]


def with_passages() -> tuple[list[Any], list[Any]]:
    """What follows from a request that wants something found, and from the answer."""
    on = replicas()
    arrived = on.request("r1", retrieval=builders.retrieval(T0 + 5_000))
    return arrived, on.retrieved("r1", builders.passage(1))


async def turns(count: int) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def sent_before_any_acknowledgement(effects: list[Effect]) -> tuple[list[str], list[str]]:
    """Topics that are written at once, and all of them once everything is acknowledged."""
    producer = FakeProducer(at_once=False)
    box = outbox(producer)
    task = asyncio.create_task(box.run())
    box.put(effects)
    await turns(9)
    at_once = [topic for topic, *_ in producer.sends]
    producer.at_once = True
    for ack in producer.acks:
        ack.set_result(None)
    await box.drain()
    task.cancel()
    return at_once, [topic for topic, *_ in producer.sends]


def test_outbox_acknowledges_in_order_once_all_records_are_sent() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box, receipts, acked = outbox(producer), Receipts(), list[str]()
        task = asyncio.create_task(box.run())
        request_effects = effects(2)
        for name, part in (
            ("first", request_effects[:2]),
            ("second", request_effects[2:]),
            ("third", []),
        ):
            box.put(part, receipts.open(PLACE, functools.partial(acked.append, name), len(part)))
        await until(lambda: len(producer.sends) == 4)
        for number in (1, 3, 0):  # all of the second, half of the first
            producer.acks[number].set_result(None)
        await asyncio.sleep(0)
        assert acked == []
        producer.acks[2].set_result(None)
        await box.drain()
        assert acked == ["first", "second", "third"]
        assert [topic for topic, *_ in producer.sends] == ["decisions"] * 2 + ["decode"] * 2
        task.cancel()

    run(main())


def test_outbox_ends_on_failed_send_without_acknowledging() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box, receipts, acked = outbox(producer), Receipts(), list[str]()
        task = asyncio.create_task(box.run())
        request_effects = effects()
        box.put(
            request_effects, receipts.open(PLACE, lambda: acked.append("r"), len(request_effects))
        )
        await until(lambda: len(producer.acks) == 2)
        producer.acks[0].set_exception(BrokerUnavailable("gone"))
        producer.acks[1].set_result(None)
        with pytest.raises(BrokerUnavailable, match="gone"):
            await task
        assert acked == []

    run(main())


def test_outbox_makes_agents_wait_while_too_much_is_pending() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box = outbox(producer, pending_max=1)
        task = asyncio.create_task(box.run())
        await box.wait_for_room()
        box.put(effects())
        waiting = asyncio.create_task(box.wait_for_room())
        await until(lambda: len(producer.acks) == 2)
        assert not waiting.done()
        for ack in producer.acks:
            ack.set_result(None)
        await waiting
        task.cancel()

    run(main())


def test_receipts_acknowledge_nothing_after_drop() -> None:
    receipts, acked = Receipts(), list[str]()
    receipt = receipts.open(PLACE, lambda: acked.append("r"), 1)
    receipts.drop()
    receipt.settle()
    assert acked == []


def test_outbox_sends_later_attempt_after_its_decision() -> None:
    """A first attempt costs no round trip; a later one needs its decision in the log."""
    on = replicas(2)
    first = on.request("r1")
    retry = on.phase(on.works[0], PhaseKind.FAILED)
    assert [e.record.attempt for e in retry if isinstance(e, Dispatch)] == [2]
    assert run(sent_before_any_acknowledgement(first)) == (["decisions", "decode"],) * 2
    at_once, in_the_end = run(sent_before_any_acknowledgement(retry))
    assert (at_once, in_the_end) == (["decisions"] * 2, ["decisions"] * 2 + ["tokens", "decode"])


def test_void_order_waits_for_outcome_of_its_attempt() -> None:
    """Otherwise the next router would wait for a worker that has dropped the attempt."""
    on = replicas(1, deadline_grace_ms=100)
    on.request("r1", deadline_ms=on.now_ms + 100)
    on.now_ms += 300
    effects = on.apply(Tick())
    at_once, in_the_end = run(sent_before_any_acknowledgement(effects))
    assert at_once == ["decisions", "outcomes", "tokens"]
    assert in_the_end == [*at_once, "decode"]


def test_outbox_writes_nothing_while_lease_is_in_doubt() -> None:
    """This holds for decisions made before a pause and while the router shuts down."""
    on = replicas(2)
    on.request("r1")
    effects = on.phase(on.works[0], PhaseKind.FAILED)

    async def main() -> None:
        producer, leased = FakeProducer(at_once=False), asyncio.Event()

        async def wait_for_lease() -> None:
            await leased.wait()

        box = Outbox(producer, "", "router-a", 100, wait_for_lease, searches.append, use)  # type: ignore[arg-type]  # a fake
        task = asyncio.create_task(box.run())
        box.put(effects)
        await turns(9)
        assert not producer.sends
        leased.set()
        await until(lambda: len(producer.acks) == 2)
        leased.clear()  # while it waits for its decisions
        for ack in producer.acks:
            ack.set_result(None)
        await turns(9)
        task.cancel()
        await asyncio.wait([task])
        box.put(effects)
        await box.drain()  # whoever winds up does not wait for what never leaves
        assert [topic for topic, *_ in producer.sends] == ["decisions"] * 2

    run(main())


def test_outbox_writes_end_to_outcomes_and_gateway() -> None:
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
        (_, first, key, partition, _), (topic, frame, _, gateway, _) = producer.sends
        assert (first, key, partition) == (outcome, "r1.2", 3)
        assert (topic, gateway, frame.worker_id) == ("tokens", 1, "router-a")
        assert frame.ends == end_frame(end, "router-a", T0).ends
        assert (frame.ends[0].attempt, frame.ends[0].seq) == (2, 0)
        Codec().encode(frame)
        task.cancel()

    run(main())


def test_outbox_sends_work_with_request_trace_and_bounds_traces() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        box.remember_trace("r0", (("other", b"x"), ("traceparent", TRACEPARENT)))
        task = asyncio.create_task(box.run())
        box.put(effects())
        await box.drain()
        assert producer.sends[1][4] == [("traceparent", TRACEPARENT)]
        for number in range(TRACES_MAX + 5):
            box.remember_trace(f"t{number}", (("traceparent", TRACEPARENT),))
        assert len(box.traces) == TRACES_MAX
        task.cancel()

    run(main())


async def test_outbox_forgets_trace_when_request_ends() -> None:
    """The trace stayed until 100 000 others had come where a worker ended the request."""
    box, usage = outbox(FakeProducer()), example("trivium.Usage")
    box.remember_trace(usage.request_id, (("traceparent", TRACEPARENT),))
    task = asyncio.create_task(box.run())
    box.put([RecordUsage(usage, 0)])
    await box.drain()
    assert not box.traces
    task.cancel()


def test_outbox_saves_last_session_and_drops_session_with_tombstone() -> None:
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
        box.put([DropSession("", "old", 0)])
        await box.drain()
        assert producer.sends == []
        box.save_sessions()
        await box.drain()
        records = [(topic, record, partition) for topic, record, _, partition, _ in producer.sends]
        assert records == [("sessions", session, 1), ("test.sessions", None, 0)]
        keys = [key for _, _, key, _, _ in producer.sends]
        assert keys == ["s", b"old"], "as sessions were written before they had tenants"
        task.cancel()

    run(main())


def test_outbox_ignores_malformed_trace() -> None:
    box = outbox(FakeProducer())
    box.remember_trace("r1", [("traceparent", b"f" * 4_000)])
    assert not box.traces
    box.remember_trace("r1", [("traceparent", TRACEPARENT)])
    assert box.traces == {"r1": TRACEPARENT}


@pytest.mark.parametrize("by_broker", [False, True])
async def test_outbox_fails_request_whose_work_is_too_large(
    by_broker: bool,
) -> None:
    """One oversized request took routers down and kept them down."""
    producer = SmallProducer(by_broker=by_broker)
    box, receipts, acked = outbox(producer), Receipts(), list[str]()
    task = asyncio.create_task(box.run())
    scene = replicas(window=1)
    request_effects = scene.request("r1")
    work = next(e.record for e in request_effects if isinstance(e, Dispatch))
    assert isinstance(work, Work)
    box.put(request_effects, receipts.open(PLACE, lambda: acked.append("r1"), len(request_effects)))
    await box.drain()
    assert [topic for topic, *_ in producer.sends] == ["decisions", "phases"]
    assert acked == ["r1"] and not task.done()
    task.cancel()
    (phase,) = [record for _, record, *_ in producer.sends if isinstance(record, Phase)]
    assert (phase.kind, phase.attempt, phase.worker_id) == (PhaseKind.FAILED, 1, work.worker_id)
    scene.workers[work.worker_id].holds.clear()  # it never had it
    (end,) = [e for e in scene.record(PhaseArrived(phase, PARTITION)) if isinstance(e, End)]
    assert end.outcome.kind is OutcomeKind.FAILED and end.outcome.error is not None
    assert end.outcome.error.code == "record_too_large"
    assert [e for e in scene.request("r2") if isinstance(e, Dispatch)], "its credit is free again"


async def test_outbox_ends_on_oversized_decision() -> None:
    scene = replicas(window=1)
    decisions = [e for e in scene.request("r1") if isinstance(e, Decide)]
    producer = SmallProducer(by_broker=False, kind=type(decisions[0].decision))
    box = outbox(producer)
    box.put(decisions)
    with pytest.raises(RecordTooLarge):
        await box.run()


def test_codec_round_trips_records_of_core() -> None:
    codec = Codec()
    for effect in effects(2):
        assert isinstance(effect, Decide | Dispatch)
        record: Any = effect.decision if isinstance(effect, Decide) else effect.record
        assert codec.decode(codec.encode(record)) == record
    assert isinstance(codec.decode(codec.encode(builders.request("r1"))), Request)


def test_outbox_starts_search_in_order_and_acknowledges() -> None:
    """The result of the search comes as a record of its own."""

    async def main() -> None:
        producer, acked = FakeProducer(), list[str]()
        box, receipts = outbox(producer), Receipts()
        task = asyncio.create_task(box.run())
        (ask,), _ = with_passages()
        box.put([ask], receipts.open(PLACE, lambda: acked.append("r"), 1))
        await box.drain()
        assert searches == [ask] and acked == ["r"] and not producer.sends
        searches.clear()
        task.cancel()

    run(main())


def test_outbox_writes_skipped_retrieval_to_phases() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        retrieved = builders.retrieved("r1")
        box.put([SkipRetrieval(retrieved, 3)])
        await box.drain()
        assert producer.sends == [("phases", retrieved, "s-r1", 3, ())]
        task.cancel()

    run(main())


def test_outbox_sends_warm_prefix_and_roles_to_their_workers() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        record = WarmPrefix(
            request_id="r1", session_id="s", worker_id="p0", worker_epoch=1, model="tiny",
            prompt_tokens=b"aaaa", deadline_ms=T0,
        )  # fmt: skip
        order = AssignRoles(worker_id="p0", worker_epoch=1, roles=(Role.PREFILL,), at_ms=T0)
        box.put([WarmCache("prefill", 3, record), LendRole("decode", 4, order)])
        await box.drain()
        assert producer.sends == [
            ("prefill", record, "r1", 3, ()),
            ("decode", order, "p0", 4, ()),
        ]
        task.cancel()

    run(main())


def test_outbox_sends_work_after_notice_of_passages_is_acknowledged() -> None:
    """A worker's first token could otherwise arrive before the passages."""

    async def main() -> None:
        _, answer_effects = with_passages()
        assert isinstance(answer_effects[0], NotifyRetrieval)
        at_once, topics = await sent_before_any_acknowledgement(answer_effects)
        assert at_once == ["tokens", "decisions"] and topics == [*at_once, "decode"]
        alone, _ = await sent_before_any_acknowledgement(effects())
        assert alone == ["decisions", "decode"]

    run(main())


def test_work_waits_only_for_notice_of_its_own_request() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        _, (tell, decided, work) = with_passages()
        box.put([tell])
        await turns(9)
        box.put([*effects(), decided, work])
        await turns(9)
        records = [
            (topic, getattr(record, "request_id", "")) for topic, record, *_ in producer.sends
        ]
        assert len(records) == 4 and records[0][0] == "tokens" and records[-1] == ("decode", "r0")
        frame = producer.sends[0][1]
        assert frame.retrieved == (tell.retrieved,) and frame.worker_id == "router-a"
        producer.acks[0].set_result(None)
        await turns(9)
        assert len(producer.sends) == 5 and producer.sends[-1][1].request_id == "r1"
        for ack in producer.acks[1:]:
            ack.set_result(None)
        await box.drain()
        assert not box._notice_acks
        task.cancel()

    run(main())


def test_work_waits_for_last_notice_of_its_request() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        _, (tell, decided, work) = with_passages()
        box.put([tell, tell])
        await turns(9)
        producer.acks[0].set_result(None)
        await turns(9)
        box.put([decided, work])
        await turns(9)
        assert [topic for topic, *_ in producer.sends] == ["tokens", "tokens", "decisions"]
        producer.acks[1].set_result(None)
        await turns(9)
        assert producer.sends[-1][0] == "decode" and not box._notice_acks
        task.cancel()

    run(main())
