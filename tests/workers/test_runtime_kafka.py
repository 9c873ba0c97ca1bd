"""Workers with simulated engines on a real broker; the test is router and gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec, pack_tokens
from schemas.errors import LeaseError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import (
    MemberKind,
    MemberState,
    Mode,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    Sampling,
    TokenFrame,
    Work,
    WorkPhase,
)
from schemas.settings import LogSettings, ModelSettings
from schemas.topics import TOPICS
from tests.waiting import until
from tests.workers.fakes import cancel_work, work
from workers.config import WorkerSettings
from workers.llm.engine import Engine
from workers.runtime import run_worker

sim_engine = pytest.importorskip("workers.llm.sim_engine", reason="the sim engine is missing")
from workers.llm.sim_settings import SimSettings  # noqa: E402  # only where the engine is there

pytestmark = pytest.mark.kafka
MODEL = ModelSettings(path="sim")
SIM = SimSettings(prefill_base_ms=2, decode_step_ms=1, transfer="memory", running_max=8)


class Router:
    """Follows the fleet, dispatches, and collects what comes back."""

    def __init__(self, settings: LogSettings) -> None:
        codec = Codec()
        self.settings = settings
        self.producer = LogProducer(settings, codec, durable=True, client_id="router-a")
        self.membership = Membership(
            settings, codec, self.producer, member_id="router-a", kind=MemberKind.ROUTER
        )
        self.found: list[Any] = []
        self.buried: list[bytes | None] = []
        self.codec = codec

    async def follow(self, topic: str) -> None:
        count = 1 if topic.endswith(".dlq") else self.settings.partitions(TOPICS[topic].group)
        reader = AssignedReader(self.settings, topic, range(count), client_id="test")
        await reader.start("earliest")
        try:
            while True:
                for record in await reader.batch():
                    if topic.endswith(".dlq"):
                        self.buried.append(record.value)
                    else:
                        self.found.append(self.codec.decode(record.value))
        finally:
            await reader.stop()

    def of(self, kind: type, request_id: str = "") -> list[Any]:
        return [
            r
            for r in self.found
            if type(r) is kind and request_id in ("", getattr(r, "request_id", ""))
        ]

    def state(self, worker_id: str) -> MemberState:
        member = self.membership.view.members.get(worker_id)
        return MemberState.GONE if member is None else member.state

    def address(self, worker_id: str) -> dict[str, Any]:
        member = self.membership.view.members[worker_id]
        return {"worker_id": worker_id, "worker_epoch": member.epoch, "router_id": "router-a"}

    async def send(self, topic: str, record: Any, worker_id: str) -> None:
        (lease,) = self.membership.view.members[worker_id].registration.leases
        assert lease.topic == topic
        key = record.request_id
        await (await self.producer.send(topic, record, key=key, partition=lease.partition))

    def answer(self, request_id: str) -> tuple[list[int], str]:
        """Tokens and text of a stream, joined as a gateway does; gaps and repeats fail."""
        ids, text = list[int](), ""
        for frame in self.of(TokenFrame):
            start = 0
            for n, row in enumerate(frame.request_ids):
                count = frame.token_counts[n]
                if row == request_id:
                    assert (frame.first_seqs[n], frame.first_chars[n]) == (len(ids), len(text))
                    ids += frame.token_ids[start : start + count]
                    text += frame.texts[n]
                start += count
        return ids, text


@asynccontextmanager
async def router_of(settings: LogSettings) -> AsyncIterator[Router]:
    router = Router(settings)
    await router.producer.start()
    await router.membership.join()
    topics = ["phases", "outcomes", "tokens", "decode.dlq"]
    tasks = [asyncio.create_task(router.follow(topic)) for topic in topics]
    tasks.append(asyncio.create_task(router.membership.run()))
    try:
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.membership.leave()
        await router.producer.stop()


@asynccontextmanager
async def worker_of(
    settings: LogSettings, router: Router, worker_id: str, role: Role, **changes: Any
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Event]]:
    stop, epoch = asyncio.Event(), wall_ms()

    async def start() -> Engine:
        engine: Engine = await sim_engine.start(
            replace(SIM, **changes),
            model=MODEL,
            engine_id=f"{worker_id}-{epoch}",
            worker_id=worker_id,
            worker_epoch=epoch,
        )
        return engine

    task = asyncio.create_task(
        run_worker(
            settings,
            WorkerSettings(engine="sim", drain_timeout_ms=5_000),
            MODEL,
            worker_id=worker_id,
            roles=[role],
            engine=start,
            stop=stop,
        )
    )
    members = router.membership.view.members
    try:
        await until(lambda: task.done() or router.state(worker_id) is MemberState.READY)
        if task.done():
            task.result()
        await until(lambda: members[worker_id].credits.get(("router-a", role), 0) > 0)
        yield task, stop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def chat(request_id: str, phase: WorkPhase, **changes: Any) -> Work:
    fields = {
        "model": MODEL.served_name,
        "prompt_tokens": pack_tokens(range(40)),
        "sampling": Sampling(max_tokens=12, seed=3, ignore_eos=True),
        "mode": Mode.REMOTE,
    }
    return work(request_id, phase, **{**fields, **changes})


@pytest.mark.parametrize("transfer", ["memory", "nixl"])
async def test_prefill_and_decode_give_the_answer_of_a_replica(
    kafka: LogSettings, transfer: str
) -> None:
    if transfer == "nixl":
        pytest.importorskip("nixl", reason="the NIXL library is missing")
    async with (
        router_of(kafka) as router,
        worker_of(kafka, router, "p", Role.PREFILL, transfer=transfer),
        worker_of(kafka, router, "d", Role.DECODE, transfer=transfer),
        worker_of(kafka, router, "r", Role.REPLICA),
    ):
        await router.send("prefill", chat("r1", WorkPhase.PREFILL, **router.address("p")), "p")
        await until(lambda: router.of(Phase, "r1") != [])
        (done,) = router.of(Phase, "r1")
        assert (done.kind, done.sent_tokens, done.kv.worker_id) == (PhaseKind.PREFILL_DONE, 1, "p")
        assert done.kv.params == b""  # the peer finds the metadata in the fleet
        assert done.kv.worker_epoch == router.membership.view.members["p"].epoch
        sent = {"first_seq": done.sent_tokens, "first_char": done.sent_chars, "kv": done.kv}
        order = chat("r1", WorkPhase.DECODE, prefill_worker="p", **sent, **router.address("d"))
        await router.send("decode", order, "d")
        order = chat("r2", WorkPhase.DECODE, mode=Mode.REPLICA, **router.address("r"))
        await router.send("decode", order, "r")
        await until(lambda: len(router.of(Outcome)) == 2)
        received = router.of(Phase, "r1")[1]
        assert (received.kind, received.worker_id) == (PhaseKind.KV_RECEIVED, "d")
        assert received.kv_bytes > 0
        (outcome,) = router.of(Outcome, "r1")
        assert (outcome.kind, outcome.prefill_worker, outcome.decode_worker) == (
            OutcomeKind.COMPLETED,
            "p",
            "d",
        )
        assert (outcome.completion_tokens, outcome.kv_bytes) == (12, received.kv_bytes)
        await until(lambda: sum(len(f.ends) for f in router.of(TokenFrame)) == 2)
        assert router.answer("r1") == router.answer("r2")
        assert len(router.answer("r1")[0]) == 12


async def test_rubbish_is_buried_and_a_cancellation_and_a_drain_end_work(
    kafka: LogSettings,
) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(kafka, router, "d", Role.REPLICA, decode_step_ms=20) as (task, stop),
    ):
        (lease,) = router.membership.view.members["d"].registration.leases
        topic = kafka.topic_prefix + "decode"
        await router.producer.send_raw(topic, b"rubbish", key=b"k", partition=lease.partition)
        long = {"sampling": Sampling(max_tokens=1_000, seed=3, ignore_eos=True)}
        order = chat("r1", WorkPhase.DECODE, **long, **router.address("d"))
        await router.send("decode", order, "d")
        await router.send("decode", chat("r2", WorkPhase.DECODE, **router.address("d")), "d")
        await until(lambda: router.answer("r1")[0] != [] and router.answer("r2")[0] != [])
        assert router.buried == [b"rubbish"]
        await router.send("decode", cancel_work("r1", worker_id="d"), "d")
        await until(lambda: router.of(Outcome, "r1") != [])
        assert router.of(Outcome, "r1")[0].kind is OutcomeKind.CANCELLED
        stop.set()
        await asyncio.wait([task])
        assert task.exception() is None
        await until(lambda: router.state("d") is MemberState.GONE)
        await until(lambda: router.of(Outcome, "r2") != [])
        assert router.of(Outcome, "r2")[0].kind is OutcomeKind.COMPLETED


async def test_a_worker_whose_name_is_taken_by_a_later_life_ends(kafka: LogSettings) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(kafka, router, "d", Role.REPLICA) as (task, _),
    ):
        member = router.membership.view.members["d"]
        later = replace(member.registration, epoch=member.epoch + 1)
        await (await router.producer.send("fleet", later, key="d", partition=0))
        await asyncio.wait([task])
        assert isinstance(task.exception(), LeaseError)
