"""An engine that does what a test says, and a log in memory with the clients' methods."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, LeaseError, NotReady
from schemas.fleet import FleetView
from schemas.records import (
    CancelWork,
    Capability,
    Grant,
    KvHandle,
    Load,
    MemberKind,
    MemberState,
    Mode,
    Orchestration,
    Registration,
    Role,
    Sampling,
    Work,
    WorkPhase,
)
from schemas.rules.sizes import check_size
from schemas.rules.tokens import pack_tokens
from schemas.topics import check_record, partition_of
from streams.log.clients import AssignedReader, Headers, LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership, OnRecord
from streams.log.retrieval.client import RetrievalClient
from streams.log.retrieval.results import RetrievalResult
from tests.waits import until
from workers.kv.block_log import BlockLog
from workers.llm.engine import EngineLoad, Job, Output, PeerMetadata
from workers.serving import LogClients

WORKER, EPOCH, MODEL = "w1", 7, "m"
CODEC = Codec()
FAR_MS = 60_000


def capability(running_max: int = 4) -> Capability:
    return Capability(
        model=MODEL,
        engine="fake",
        engine_id="e-fake",
        block_size=16,
        max_model_len=128,
        running_max=running_max,
    )


class FakeEngine:
    """Records its calls; `say` sets the outputs of the next step."""

    block_log: BlockLog | None = None  # where a test gives it one, it is published

    def __init__(self, running_max: int = 4) -> None:
        self.capability = capability(running_max)
        self.jobs: list[Job] = []
        self.aborted: list[str] = []
        self.closed = False
        self.figures = EngineLoad()
        self._steps: asyncio.Queue[list[Output] | Exception] = asyncio.Queue()

    def add(self, job: Job) -> None:
        self.jobs.append(job)

    async def outputs(self) -> list[Output]:
        step = await self._steps.get()
        if isinstance(step, Exception):
            raise step
        return step

    def say(self, *outputs: Output) -> None:
        self._steps.put_nowait(list(outputs))

    @property
    def is_heard(self) -> bool:
        """Return whether every step was taken and the worker waits for the next one."""
        return self._steps.empty() and bool(self._steps._getters)  # type: ignore[attr-defined]

    def die(self, error: Exception) -> None:
        self._steps.put_nowait(error)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def texts(self, before: Sequence[int], output: Output) -> list[str]:
        """Return one letter per token where there are as many, else all text at the last one."""
        count = len(output.token_ids)
        letters = list(output.text)
        return letters if len(letters) == count else [""] * (count - 1) + [output.text]

    def load(self) -> EngineLoad:
        return self.figures

    async def close(self) -> None:
        self.closed = True


class FakeKvEngine(FakeEngine):
    """An engine that exchanges KV and learns its peers."""

    def __init__(self, running_max: int = 4) -> None:
        super().__init__(running_max)
        self.lookups: list[PeerMetadata] = []
        self.observed_workers: list[tuple[str, int, str]] = []  # workers, their epochs and engines
        self.lives: list[int] = []  # its worker's later epochs

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        self.lookups.append(peer_metadata)

    def observe_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        self.observed_workers.append((worker_id, epoch, engine_id))

    def begin_epoch(self, epoch: int) -> None:
        self.lives.append(epoch)


class FakeLog:
    """Records what is sent, as (topic, partition, key, record, headers), and scripts sends."""

    def __init__(self) -> None:
        self.sends: list[tuple[str, int, str, Any, Headers]] = []
        self.sent_by: list[str] = []  # which producer sent each of them
        self.closed: list[tuple[str, str]] = []  # producers, and what becomes of what they hold
        self.dead_letters: list[tuple[str, bytes | None]] = []
        self.errors: dict[
            str, deque[Exception]
        ] = {}  # topic to errors of its next acknowledgements
        self.refusing: set[str] = set()  # topics whose sends raise
        self.held_acks: dict[str, list[asyncio.Future[Any]]] = {}  # topics whose acks wait
        self.readers: dict[str, FakeReader] = {}
        self.full: set[str] = set()  # topics without a free partition
        self.leases = {"prefill": 1, "decode": 2}
        self.meetings: list[Exception] = []  # what stands in the way of the next lives
        self.retrieval_clients: list[FakeRetrievalClient] = []  # that serve now
        self.searches: list[tuple[str, dict[str, Any]]] = []
        self.is_silent = False  # nobody answers a search
        self.search_result: RetrievalResult | Exception = NotReady(
            "nothing is there to be searched"
        )

    def of(self, kind: type) -> list[Any]:
        return [record for *_, record, _ in self.sends if type(record) is kind]


class FakeProducer:
    def __init__(self, log: FakeLog, name: str = "") -> None:
        self.log = log
        self.name = name
        self.open = False

    async def start(self) -> None:
        self.open = True

    async def stop(self) -> None:
        self.open = False
        self.log.closed.append((self.name, "sent"))

    async def discard(self) -> None:
        self.open = False
        self.log.closed.append((self.name, "discarded"))

    def session_partition(self, session_id: str) -> int:
        return partition_of(session_id, 4)

    async def send(
        self, topic: str, record: Any, *, key: str, partition: int, headers: Headers = ()
    ) -> asyncio.Future[Any]:
        assert self.open
        check_record(topic, record)
        check_size(record, len(CODEC.encode(record)))
        if topic in self.log.refusing:
            raise BrokerUnavailable(f"{topic} takes nothing")
        ack = asyncio.get_running_loop().create_future()
        errors = self.log.errors.get(topic)
        if errors:
            ack.set_exception(errors.popleft())
            return ack
        self.log.sends.append((topic, partition, key, record, headers))
        self.log.sent_by.append(self.name)
        if topic in self.log.held_acks:
            self.log.held_acks[topic].append(ack)
        else:
            ack.set_result(None)
        return ack

    async def send_raw(
        self, full_topic: str, value: bytes | None, **options: object
    ) -> asyncio.Future[Any]:
        self.log.dead_letters.append((full_topic, value))
        ack = asyncio.get_running_loop().create_future()
        ack.set_result(None)
        return ack


class FakeReader:
    def __init__(self, topic: str, partition: int, codec: Codec) -> None:
        self.topic = topic
        self.partition = partition
        self.started_at: object = None
        self.stopped = False
        self._codec = codec
        self._records: asyncio.Queue[ConsumerRecord] = asyncio.Queue()

    def put(self, record: Any, headers: Headers = ()) -> None:
        value = record if isinstance(record, bytes) else self._codec.encode(record)
        fields = (self.topic, self.partition, 0, 0, 0, b"k", value, None, 1, len(value))
        self._records.put_nowait(ConsumerRecord(*fields, tuple(headers)))

    async def start(self, at: Literal["earliest", "latest"] | dict[int, int]) -> None:
        self.started_at = at

    async def batch(self, *, max_records: int = 500, timeout_ms: int = 60_000) -> list[Any]:
        records = [await self._records.get()]
        while len(records) < max_records and not self._records.empty():
            records.append(self._records.get_nowait())
        return records

    async def stop(self) -> None:
        self.stopped = True


class FakeRetrievalClient:
    """Answers searches with the log's `search_result`."""

    def __init__(self, log: FakeLog) -> None:
        self.log = log

    async def start(self) -> None:
        self.log.retrieval_clients.append(self)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.log.retrieval_clients.remove(self)

    async def search_text(self, text: str, **fields: Any) -> RetrievalResult:
        self.log.searches.append((text, fields))
        if self.log.is_silent:
            await asyncio.Event().wait()
        if isinstance(self.log.search_result, Exception):
            raise self.log.search_result
        return self.log.search_result


class FakeMembership:
    """A member whose lease stands until the test revokes it."""

    def __init__(self, on_record: OnRecord | None = None) -> None:
        self.member_id = WORKER
        self.epoch = EPOCH
        self.leases: dict[str, int] = {"prefill": 1, "decode": 2}
        self.view = FleetView()
        self.states: list[MemberState] = [MemberState.STARTING]
        self.initial_roles: tuple[Role, ...] = ()  # its roles at first
        self.published: Capability | None = None
        self.met = False
        self.meetings: list[Exception] = []  # how the next ones go; shared by all lives
        self.roles: list[tuple[Role, ...]] = []  # those that it was given while running
        self.full: set[str] = set()  # topics without a free partition
        self.beats: list[list[Grant]] = []
        self.valid = True
        self.waiting = 0  # who had to wait for that, ever
        self.has_left = False
        self.load_source: Any = Load
        self.grant_source: Any = list
        self.lease_loss = asyncio.Event()
        self.on_record = on_record

    def check_name(self, record: Registration) -> None:
        """Accept any name."""

    async def meet(self) -> None:
        if self.meetings:
            raise self.meetings.pop(0)
        self.met = True

    async def join(self, capability: Capability | None = None) -> None:
        assert self.met
        if self.full:
            raise LeaseError(f"all partitions of {', '.join(self.full)} are leased")
        self.published = capability
        await self.beat_now()

    async def update(self, capability: Capability, roles: Sequence[Role] | None = None) -> None:
        self.published = capability
        if roles is not None:
            self.roles.append(tuple(roles))

    async def lease(self, topic: str) -> int:
        if topic in self.full:
            raise LeaseError(f"all partitions of {topic} are leased")
        self.leases[topic] = 3
        return 3

    async def run(self) -> None:
        await self.lease_loss.wait()
        raise LeaseError("lost")

    def set_state(self, state: MemberState) -> None:
        self.states.append(state)

    async def beat_now(self) -> None:
        self.load_source()
        self.beats.append(self.grant_source())

    def is_valid(self) -> bool:
        return self.valid

    async def wait_until_valid(self) -> None:
        self.waiting += not self.valid
        await until(lambda: self.valid)

    async def leave(self) -> None:
        await self.beat_now()
        self.has_left = True

    def add_router(self, router_id: str) -> None:
        self._add(Registration(member_id=router_id, epoch=1, kind=MemberKind.ROUTER, started_ms=1))

    def add_worker(self, worker_id: str, epoch: int, nixl_metadata: bytes) -> None:
        worker_capability = replace(
            capability(), engine_id=f"e-{worker_id}", nixl_metadata=nixl_metadata
        )
        self._add(
            Registration(
                member_id=worker_id,
                epoch=epoch,
                kind=MemberKind.WORKER,
                started_ms=1,
                capability=worker_capability,
            )
        )

    def _add(self, record: Registration) -> None:
        self.view.apply(record, len(self.view.members), wall_ms())
        if self.on_record is not None:
            self.on_record(record, 0, wall_ms())


def clients(log: FakeLog) -> tuple[LogClients, list[FakeMembership]]:
    """Return the clients of a worker, and the list in which its memberships appear."""
    codec, memberships = Codec(), list[FakeMembership]()

    def membership(on_record: OnRecord, roles: Sequence[Role], former_epoch: int) -> Membership:
        memberships.append(FakeMembership(on_record))
        memberships[-1].full, memberships[-1].meetings = log.full, log.meetings
        memberships[-1].leases, memberships[-1].initial_roles = dict(log.leases), tuple(roles)
        memberships[-1].epoch = max(EPOCH, former_epoch + 1)
        return cast(Membership, memberships[-1])

    def reader(topic: str, partition: int) -> AssignedReader:
        log.readers[topic] = FakeReader(topic, partition, codec)
        return cast(AssignedReader, log.readers[topic])

    producers = [cast(LogProducer, FakeProducer(log, name)) for name in ("durable", "tokens")]
    bundle = LogClients(
        codec=codec,
        durable=producers[0],
        tokens=producers[1],
        membership=membership,
        reader=reader,
        retrieval_client=lambda membership: cast(RetrievalClient, FakeRetrievalClient(log)),
    )
    return bundle, memberships


def work(
    request_id: str = "r1", phase: WorkPhase = WorkPhase.DECODE, now_ms: int = 0, **changes: Any
) -> Work:
    """Return work for this worker, due in a minute."""
    now_ms = now_ms or wall_ms()
    fields: dict[str, Any] = {
        "request_id": request_id,
        "session_id": f"s-{request_id}",
        "attempt": 1,
        "router_id": "router-a",
        "worker_id": WORKER,
        "worker_epoch": EPOCH,
        "phase": phase,
        "mode": Mode.REPLICA,
        "orchestration": Orchestration.NONE,
        "model": MODEL,
        "prompt_tokens": pack_tokens([1, 2, 3]),
        "sampling": Sampling(max_tokens=8),
        "arrived_ms": now_ms - 5,
        "deadline_ms": now_ms + FAR_MS,
        "gateway_partition": 0,
        "dispatched_ms": now_ms,
    }
    return Work(**{**fields, **changes})


def cancel_work(request_id: str = "r1", attempt: int = 1, worker_id: str = WORKER) -> CancelWork:
    return CancelWork(request_id=request_id, attempt=attempt, worker_id=worker_id, at_ms=wall_ms())


def handle(expires_at_ms: int, worker_id: str = "") -> KvHandle:
    """Return a KV handle as an engine makes it, without worker and epoch."""
    return KvHandle(
        worker_id=worker_id,
        worker_epoch=0,
        engine_id="e-other",
        engine_request_id="x",
        tokens=3,
        block_size=16,
        block_ids=(0,),
        expires_at_ms=expires_at_ms,
    )


def out(job_id: str = "r1.1", ids: Sequence[int] = (), text: str = "", **fields: Any) -> Output:
    return Output(request_id=job_id, token_ids=ids, text=text, **fields)
