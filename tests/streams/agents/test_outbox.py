"""What a router writes, in which order, and what it acknowledges when."""

import asyncio
import functools
from typing import Any

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.log.clients import Ack
from schemas.log.faust.receipts import Receipts
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
from streams.agents.outbox import TRACES_MAX, Outbox
from streams.agents.records import end_frame
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
from tests.schemas.examples import TRACEPARENT, example
from tests.streams import builders
from tests.streams.agents.fakes import (
    FakeProducer,
    standing,
)
from tests.streams.builders import T0
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import replicas
from tests.waiting import run, until

PLACE = ("requests", 0)
asked: list[StartRetrieval] = []


def use(effect: RecordUsage, outcome: Ack | None) -> Ack:
    """What has been used is written at once."""
    told: Ack = asyncio.get_running_loop().create_future()
    told.set_result(None)
    return told


class SmallProducer(FakeProducer):
    """Takes no work: by itself, or by the word of its broker."""

    def __init__(self, *, by_broker: bool, kind: type = Work) -> None:
        super().__init__()
        self.by_broker, self.kind = by_broker, kind

    async def send(self, topic: str, record: Any, **more: Any) -> asyncio.Future[None]:
        if not isinstance(record, self.kind):
            return await super().send(topic, record, **more)
        if not self.by_broker:
            raise RecordTooLarge("decode[0]: not sent")
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ack.set_exception(MessageSizeTooLargeError("too large"))
        return ack


def outbox(producer: Any, pending_max: int = 100) -> Outbox:
    return Outbox(producer, "test.", "router-a", pending_max, standing, asked.append, use)


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
    at_once = [topic for topic, *_ in producer.sent]
    producer.at_once = True
    for ack in producer.acks:
        ack.set_result(None)
    await box.drain()
    task.cancel()
    return at_once, [topic for topic, *_ in producer.sent]


def test_records_are_acknowledged_in_order_and_only_when_all_is_sent() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box, receipts, acked = outbox(producer), Receipts(), list[str]()
        task = asyncio.create_task(box.run())
        made = effects(2)
        for name, part in (("first", made[:2]), ("second", made[2:]), ("third", [])):
            box.put(part, receipts.open(PLACE, functools.partial(acked.append, name), len(part)))
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
        box, receipts, acked = outbox(producer), Receipts(), list[str]()
        task = asyncio.create_task(box.run())
        made = effects()
        box.put(made, receipts.open(PLACE, lambda: acked.append("r"), len(made)))
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


def test_receipts_that_were_dropped_acknowledge_nothing() -> None:
    receipts, acked = Receipts(), list[str]()
    receipt = receipts.open(PLACE, lambda: acked.append("r"), 1)
    receipts.drop()
    receipt.settle()
    assert acked == []


def test_a_first_attempt_waits_for_nothing_and_a_later_one_for_its_decision() -> None:
    """The usual way costs no round trip; what no number can tell apart is ordered."""
    on = replicas(2)
    first = on.request("r1")
    again = on.phase(on.works[0], PhaseKind.FAILED)
    assert [e.record.attempt for e in again if isinstance(e, Dispatch)] == [2]
    assert run(sent_before_any_acknowledgement(first)) == (["decisions", "decode"],) * 2
    at_once, in_the_end = run(sent_before_any_acknowledgement(again))
    assert (at_once, in_the_end) == (["decisions"] * 2, ["decisions"] * 2 + ["tokens", "decode"])


def test_a_void_order_waits_for_whatever_ends_its_attempt() -> None:
    """Else the next router would wait for a worker that has dropped the attempt."""
    on = replicas(1, deadline_grace_ms=100)
    on.request("r1", deadline_ms=on.now_ms + 100)
    on.now_ms += 300
    effects = on.apply(Tick())
    at_once, in_the_end = run(sent_before_any_acknowledgement(effects))
    assert at_once == ["decisions", "outcomes", "tokens"]
    assert in_the_end == [*at_once, "decode"]


def test_a_router_writes_nothing_while_its_lease_is_in_doubt() -> None:
    """Not what it decided before it slept, and not while it winds up."""
    on = replicas(2)
    on.request("r1")
    effects = on.phase(on.works[0], PhaseKind.FAILED)

    async def main() -> None:
        producer, leased = FakeProducer(at_once=False), asyncio.Event()

        async def wait_for_lease() -> None:
            await leased.wait()

        box = Outbox(producer, "", "router-a", 100, wait_for_lease, asked.append, use)  # type: ignore[arg-type]  # a fake
        task = asyncio.create_task(box.run())
        box.put(effects)
        await turns(9)
        assert not producer.sent
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
        assert [topic for topic, *_ in producer.sent] == ["decisions"] * 2

    run(main())


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
        box.remember_trace("r0", (("other", b"x"), ("traceparent", TRACEPARENT)))
        task = asyncio.create_task(box.run())
        box.put(effects())
        await box.drain()
        assert producer.sent[1][4] == [("traceparent", TRACEPARENT)]
        for number in range(TRACES_MAX + 5):
            box.remember_trace(f"t{number}", (("traceparent", TRACEPARENT),))
        assert len(box.traces) == TRACES_MAX
        task.cancel()

    run(main())


async def test_a_trace_is_forgotten_with_its_request_whoever_ended_it() -> None:
    """It was kept until 100 000 others had come, where a worker ended the request."""
    box, usage = outbox(FakeProducer()), example("trivium.Usage")
    box.remember_trace(usage.request_id, (("traceparent", TRACEPARENT),))
    task = asyncio.create_task(box.run())
    box.put([RecordUsage(usage, 0)])
    await box.drain()
    assert not box.traces
    task.cancel()


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
        box.put([DropSession("", "old", 0)])
        await box.drain()
        assert producer.sent == []
        box.save_sessions()
        await box.drain()
        sent = [(topic, record, partition) for topic, record, _, partition, _ in producer.sent]
        assert sent == [("sessions", session, 1), ("test.sessions", None, 0)]
        keys = [key for _, _, key, _, _ in producer.sent]
        assert keys == ["s", b"old"], "as sessions were written before they had tenants"
        task.cancel()

    run(main())


def test_a_trace_of_another_form_goes_no_further() -> None:
    """Whoever wrote the request."""
    box = outbox(FakeProducer())
    box.remember_trace("r1", [("traceparent", b"f" * 4_000)])
    assert not box.traces
    box.remember_trace("r1", [("traceparent", TRACEPARENT)])
    assert box.traces == {"r1": TRACEPARENT}


@pytest.mark.parametrize("by_broker", [False, True])
async def test_work_that_cannot_be_sent_fails_its_request_and_not_the_router(
    by_broker: bool,
) -> None:
    """One oversized request took routers down, and kept them down."""
    producer = SmallProducer(by_broker=by_broker)
    box, receipts, acked = outbox(producer), Receipts(), list[str]()
    task = asyncio.create_task(box.run())
    scene = replicas(window=1)
    made = scene.request("r1")
    work = next(e.record for e in made if isinstance(e, Dispatch))
    assert isinstance(work, Work)
    box.put(made, receipts.open(PLACE, lambda: acked.append("r1"), len(made)))
    await box.drain()
    assert [topic for topic, *_ in producer.sent] == ["decisions", "phases"]
    assert acked == ["r1"] and not task.done()
    task.cancel()
    (phase,) = [record for _, record, *_ in producer.sent if isinstance(record, Phase)]
    assert (phase.kind, phase.attempt, phase.worker_id) == (PhaseKind.FAILED, 1, work.worker_id)
    scene.workers[work.worker_id].holds.clear()  # it never had it
    (end,) = [e for e in scene.record(PhaseArrived(phase, PARTITION)) if isinstance(e, End)]
    assert end.outcome.kind is OutcomeKind.FAILED and end.outcome.error is not None
    assert end.outcome.error.code == "record_too_large"
    assert [e for e in scene.request("r2") if isinstance(e, Dispatch)], "its credit is free again"


async def test_what_is_about_no_worker_still_ends_the_router() -> None:
    scene = replicas(window=1)
    decisions = [e for e in scene.request("r1") if isinstance(e, Decide)]
    producer = SmallProducer(by_broker=False, kind=type(decisions[0].decision))
    box = outbox(producer)
    box.put(decisions)
    with pytest.raises(RecordTooLarge):
        await box.run()


def test_records_of_the_core_encode() -> None:
    codec = Codec()
    for effect in effects(2):
        assert isinstance(effect, Decide | Dispatch)
        record: Any = effect.decision if isinstance(effect, Decide) else effect.record
        assert codec.decode(codec.encode(record)) == record
    assert isinstance(codec.decode(codec.encode(builders.request("r1"))), Request)


def test_a_search_is_begun_in_its_turn_and_counts_as_done() -> None:
    """What it finds comes as a record of its own."""

    async def main() -> None:
        producer, acked = FakeProducer(), list[str]()
        box, receipts = outbox(producer), Receipts()
        task = asyncio.create_task(box.run())
        (ask,), _ = with_passages()
        box.put([ask], receipts.open(PLACE, lambda: acked.append("r"), 1))
        await box.drain()
        assert asked == [ask] and acked == ["r"] and not producer.sent
        asked.clear()
        task.cancel()

    run(main())


def test_what_goes_without_is_written_where_answers_are() -> None:
    async def main() -> None:
        producer = FakeProducer()
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        retrieved = builders.retrieved("r1")
        box.put([SkipRetrieval(retrieved, 3)])
        await box.drain()
        assert producer.sent == [("phases", retrieved, "s-r1", 3, ())]
        task.cancel()

    run(main())


def test_a_prompts_beginning_and_other_roles_go_to_their_workers() -> None:
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
        assert producer.sent == [
            ("prefill", record, "r1", 3, ()),
            ("decode", order, "p0", 4, ()),
        ]
        task.cancel()

    run(main())


def test_work_with_passages_waits_until_its_reader_was_told() -> None:
    """A worker's first token may else be there before."""

    async def main() -> None:
        _, found = with_passages()
        assert isinstance(found[0], NotifyRetrieval)
        at_once, topics = await sent_before_any_acknowledgement(found)
        assert at_once == ["tokens", "decisions"] and topics == [*at_once, "decode"]
        alone, _ = await sent_before_any_acknowledgement(effects())
        assert alone == ["decisions", "decode"]

    run(main())


def test_work_waits_for_its_own_readers_word_alone_also_later() -> None:
    async def main() -> None:
        producer = FakeProducer(at_once=False)
        box = outbox(producer)
        task = asyncio.create_task(box.run())
        _, (tell, decided, work) = with_passages()
        box.put([tell])
        await turns(9)
        box.put([*effects(), decided, work])
        await turns(9)
        sent = [(topic, getattr(record, "request_id", "")) for topic, record, *_ in producer.sent]
        assert len(sent) == 4 and sent[0][0] == "tokens" and sent[-1] == ("decode", "r0")
        frame = producer.sent[0][1]
        assert frame.retrieved == (tell.retrieved,) and frame.worker_id == "router-a"
        producer.acks[0].set_result(None)
        await turns(9)
        assert len(producer.sent) == 5 and producer.sent[-1][1].request_id == "r1"
        for ack in producer.acks[1:]:
            ack.set_result(None)
        await box.drain()
        assert not box._notice_acks
        task.cancel()

    run(main())


def test_work_waits_for_the_last_of_several_words_to_its_reader() -> None:
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
        assert [topic for topic, *_ in producer.sent] == ["tokens", "tokens", "decisions"]
        producer.acks[1].set_result(None)
        await turns(9)
        assert producer.sent[-1][0] == "decode" and not box._notice_acks
        task.cancel()

    run(main())
