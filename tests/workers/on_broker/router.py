"""A router of a test's own, and workers with simulated engines, on a real broker."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from schemas.codec import Codec
from schemas.records import (
    MemberKind,
    MemberState,
    Mode,
    Role,
    Sampling,
    TokenFrame,
    Work,
    WorkPhase,
)
from schemas.rules.tokens import pack_tokens
from schemas.settings import LogSettings, ModelSettings
from schemas.topics import TOPICS
from streams.log.clients import AssignedReader, LogProducer
from streams.log.membership import Membership
from tests.long_leases import long_leases
from tests.waits import until
from tests.workers.fakes import work
from workers.config import WorkerSettings
from workers.llm.engine import Engine
from workers.llm.sim import engine as sim_engine
from workers.llm.sim.settings import SimSettings
from workers.runtime import run_worker

MODEL = ModelSettings(path="sim")
PATIENT_MS = 60_000  # longer than any machine stalls, where no test is about such a time
SIM = SimSettings(
    prefill_base_ms=2,
    decode_step_ms=1,
    transfer="memory",
    running_max=8,
    handle_ttl_ms=2 * PATIENT_MS,
    transfer_timeout_ms=PATIENT_MS,
)


class Router:
    """Follows the fleet, dispatches, and collects what comes back."""

    def __init__(self, settings: LogSettings) -> None:
        codec = Codec()
        self.settings = settings = replace(settings, request_timeout_ms=PATIENT_MS)
        self.producer = LogProducer(settings, codec, durable=True, client_id="router-a")
        self.membership = Membership(
            settings, codec, self.producer, member_id="router-a", kind=MemberKind.ROUTER
        )
        self.records: list[Any] = []
        self.dead_letters: list[bytes | None] = []
        self.codec = codec

    async def follow(self, topic: str) -> None:
        count = 1 if topic.endswith(".dlq") else self.settings.partitions(TOPICS[topic].group)
        reader = AssignedReader(self.settings, topic, range(count), client_id="test")
        await reader.start("earliest")
        try:
            while True:
                for record in await reader.batch():
                    if topic.endswith(".dlq"):
                        self.dead_letters.append(record.value)
                    else:
                        self.records.append(self.codec.decode(record.value))
        finally:
            await reader.stop()

    def of(self, kind: type, request_id: str = "") -> list[Any]:
        return [
            r
            for r in self.records
            if type(r) is kind and request_id in ("", getattr(r, "request_id", ""))
        ]

    def state(self, worker_id: str) -> MemberState:
        member = self.membership.view.members.get(worker_id)
        return MemberState.GONE if member is None else member.state

    def address(self, worker_id: str) -> dict[str, Any]:
        member = self.membership.view.members[worker_id]
        return {"worker_id": worker_id, "worker_epoch": member.epoch, "router_id": "router-a"}

    async def send(self, topic: str, record: Any, worker_id: str) -> None:
        leases = self.membership.view.members[worker_id].registration.leases
        (partition,) = (lease.partition for lease in leases if lease.topic == topic)
        key = record.request_id
        await (await self.producer.send(topic, record, key=key, partition=partition))

    def answer(self, request_id: str) -> tuple[list[int], str]:
        """Return the joined tokens and text of a stream; repeated parts must agree."""
        ids, text = list[int](), ""
        for frame in self.of(TokenFrame):
            start = 0
            for n, row in enumerate(frame.request_ids):
                count = frame.token_counts[n]
                if row == request_id:
                    seq, char = frame.first_seqs[n], frame.first_chars[n]
                    new = [*ids[:seq], *frame.token_ids[start : start + count]]
                    new_text = text[:char] + frame.texts[n]
                    assert (new[: len(ids)], new_text[: len(text)]) == (ids, text)
                    ids, text = new, new_text
                start += count
        return ids, text


@asynccontextmanager
async def router_of(settings: LogSettings) -> AsyncIterator[Router]:
    """A router that follows all topics; meanwhile no member of this process loses its lease."""
    with long_leases(PATIENT_MS):
        async with _running(Router(settings)) as router:
            yield router


@asynccontextmanager
async def _running(router: Router) -> AsyncIterator[Router]:
    await router.producer.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        await router.membership.join()
        topics = ["phases", "outcomes", "tokens", "decode.dlq"]
        tasks += [asyncio.create_task(router.follow(topic)) for topic in topics]
        tasks.append(asyncio.create_task(router.membership.run()))
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.membership.leave()
        await router.producer.stop()


@asynccontextmanager
async def worker_of(
    router: Router,
    worker_id: str,
    role: Role | Sequence[Role],
    **changes: Any,
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Event]]:
    """A worker with a simulated engine that serves, its task, and what stops it."""
    stop = asyncio.Event()
    roles = [role] if isinstance(role, Role) else list(role)

    async def start(epoch: int) -> Engine:
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
            router.settings,
            WorkerSettings(engine="sim", drain_timeout_ms=PATIENT_MS),
            MODEL,
            worker_id=worker_id,
            roles=roles,
            engine=start,
            stop=stop,
        )
    )
    members = router.membership.view.members
    try:
        await until(lambda: task.done() or router.state(worker_id) is MemberState.READY)
        if task.done():
            task.result()
        await until(lambda: {role for _, role in members[worker_id].credits} == {*roles})
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
