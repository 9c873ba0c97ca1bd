"""A worker process between Kafka and an engine: starts, serves, drains and leaves.

`run_worker` is what the command line calls; it returns after a drain and raises a TriviumError when
the worker has to end otherwise, so that its launcher starts a new life. The loops are in
`workers/loops.py`, the rules in `workers/llm/held.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, EngineDead, TriviumError, WorkerRefused
from schemas.fleet import HEARTBEAT_MS
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership, OnRecord
from schemas.records import MemberKind, MemberState, Role, WireError
from schemas.settings import LogSettings, ModelSettings
from workers import tasks
from workers.config import WorkerSettings
from workers.frames import Frames
from workers.kv_events import KvEventsPublisher
from workers.llm.engine import Engine
from workers.llm.held import Held, Limits
from workers.llm.stream import Identity
from workers.loops import Loops
from workers.outbox import Outbox
from workers.presence import Presence
from workers.roles import RoleOrders, lease_topics

log = logging.getLogger("trivium.worker")
EngineSource = Engine | Callable[[int], Awaitable[Engine]]  # by the worker's epoch
# Figures of EngineLoad.extra, by engine: how many handed-over KVs still wait for their peer.
HANDLES_HELD = ("kv_handles_held", "held")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogClients:
    """The log as a worker uses it; tests pass their own."""

    codec: Codec
    durable: LogProducer
    tokens: LogProducer
    membership: Callable[[OnRecord], Membership]
    reader: Callable[[str, int], AssignedReader]  # of a topic and partition


async def run_worker(
    log_settings: LogSettings,
    worker: WorkerSettings,
    model: ModelSettings,
    *,
    worker_id: str,
    roles: Sequence[Role],
    engine: EngineSource,
    stop: asyncio.Event,
    codec: Codec | None = None,
) -> None:
    """Serve until `stop` is set and the held work is done.

    `engine` is started, or an async function that starts it when the worker has its epoch; it is
    closed at the end in any case. The worker joins the fleet when its engine is up.
    """
    codec = codec or Codec()
    topics = lease_topics(roles)
    durable = LogProducer(log_settings, codec, durable=True, client_id=worker_id)
    clients = LogClients(
        codec=codec,
        durable=durable,
        tokens=LogProducer(log_settings, codec, durable=False, client_id=f"{worker_id}-tokens"),
        membership=lambda on_record: Membership(
            log_settings,
            codec,
            durable,
            member_id=worker_id,
            kind=MemberKind.WORKER,
            roles=roles,
            lease_topics=topics,
            on_record=on_record,
        ),
        reader=lambda topic, partition: AssignedReader(
            log_settings,
            topic,
            [partition],
            client_id=f"{worker_id}-{topic}",
            committed_group=f"{topic}-workers",
        ),
    )
    await Worker(clients, log_settings, worker, model, roles).run(engine, stop)


class Worker:
    """One life of a worker; `run` once."""

    def __init__(
        self,
        clients: LogClients,
        log_settings: LogSettings,
        settings: WorkerSettings,
        model: ModelSettings,
        roles: Sequence[Role],
    ) -> None:
        self._clients = clients
        self._log_settings = log_settings
        self._settings = settings
        self._model = model
        self._roles = tuple(roles)
        self._presence = Presence(clients.membership)
        self._membership = self._presence.membership
        self._tasks = tasks.Tasks()
        self._readers: dict[str, AssignedReader] = {}
        self._engine: Engine | None = None
        self._held: Held | None = None
        self._loops: Loops | None = None

    async def run(self, engine: EngineSource, stop: asyncio.Event) -> None:
        """The whole life; see the module's docstring for how it ends."""
        try:
            await self._meet()
            if not await self._start_engine(engine, stop):
                return
            await self._join()
            await self._open()
            await self._tasks.until(stop.wait())
            await self._drain()
        except EngineDead as error:
            log.error("%s: %s", self._membership.member_id, error.message)
            await self._give_back_if_possible(error.to_wire())
            raise
        finally:
            await self._close()

    async def _meet(self) -> None:
        await self._clients.durable.start()
        await self._clients.tokens.start()
        await self._membership.meet()

    async def _join(self) -> None:
        """Only now: an engine that starts may keep the machine busy for longer than a lease."""
        assert self._engine is not None
        await self._membership.join(self._engine.capability)
        self._tasks.spawn("membership", self._membership.run())
        for topic, partition in self._membership.leases.items():
            await self._open_reader(topic, partition)

    async def _open_reader(self, topic: str, partition: int) -> AssignedReader:
        reader = self._readers[topic] = self._clients.reader(topic, partition)
        await reader.start("latest")  # older work was for an earlier holder
        return reader

    async def _start_engine(self, source: EngineSource, stop: asyncio.Event) -> bool:
        if not callable(source):
            self._engine = source
            return True
        starting = asyncio.ensure_future(source(self._membership.epoch))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await tasks.cancel(starting, stopped)
            if not starting.cancelled() and starting.exception() is None:
                self._engine = starting.result()  # to be closed, if not to be used
        if starting.cancelled():  # stopped while starting
            return False
        starting.result()
        return True

    def _hold(self, engine: Engine) -> None:
        """Build what serves the engine's capacity."""
        membership, clients, settings = self._membership, self._clients, self._settings
        capacities = self._capacities(engine, self._roles)
        held_max = 2 * sum(capacities.values())
        identity = Identity(worker_id=membership.member_id, epoch=membership.epoch)
        limits = Limits(
            roles=frozenset(self._roles),
            model=self._model.served_name,
            held_max=held_max,
            seen_max=max(settings.seen_max, 4 * held_max),
            gateway_partitions=self._log_settings.gateway_partitions,
        )
        frames = Frames(identity.worker_id)
        outbox = Outbox(
            clients.durable,
            membership.is_valid,
            pending_max=settings.reports_pending_max,
            tries_max=settings.report_tries_max,
        )
        self._tasks.spawn("outbox", outbox.run())
        presence = self._presence
        self._held = Held(engine, identity, limits, frames, outbox.add, presence.epoch_of)
        presence.serve(engine, self._held, capacities)
        orders = RoleOrders(identity, engine.capability, self._assign)
        self._tasks.spawn("roles", orders.run())
        self._loops = Loops(
            codec=clients.codec,
            durable=clients.durable,
            tokens=clients.tokens,
            membership=membership,
            engine=engine,
            held=self._held,
            frames=frames,
            outbox=outbox,
            settings=settings,
            assign=orders.take,
        )

    def _capacities(self, engine: Engine, roles: Collection[Role]) -> dict[Role, int]:
        running_max = engine.capability.running_max
        prefill = self._settings.prefill_credits or running_max
        rest = self._settings.decode_credits or running_max
        return {role: prefill if role is Role.PREFILL else rest for role in roles}

    async def _assign(self, roles: Sequence[Role]) -> None:
        """Serve other roles: partitions first, then credits, then the fleet may know.

        Those given up are served until it has heard that: routers may have sent work for them.
        """
        assert self._engine is not None
        assert self._held is not None
        assert self._loops is not None
        try:
            for topic in lease_topics(roles):
                if topic not in self._readers:
                    partition = await self._membership.lease(topic)
                    reader = await self._open_reader(topic, partition)
                    self._tasks.spawn(f"read {topic}", self._loops.read(reader))
            self._take(self._engine, self._held, {*self._roles, *roles})
            self._presence.offer(self._capacities(self._engine, roles))
            await self._membership.update(self._engine.capability, roles)
        except KafkaError as error:
            raise BrokerUnavailable(f"roles were not changed: {error}") from error
        await self._presence.try_beat()
        await asyncio.sleep(HEARTBEAT_MS / 1000)
        self._take(self._engine, self._held, roles)
        self._roles = tuple(roles)

    def _take(self, engine: Engine, held: Held, roles: Collection[Role]) -> None:
        held.assign(roles, 2 * sum(self._capacities(engine, roles).values()))

    def _publish_kv(self, engine: Engine) -> None:
        blocks = getattr(engine, "block_log", None)
        if blocks is None:
            return
        membership = self._membership
        publisher = KvEventsPublisher(
            blocks,
            self._clients.tokens,
            Identity(worker_id=membership.member_id, epoch=membership.epoch),
            membership.is_valid,
            self._settings,
        )
        self._presence.on_router = publisher.want_snapshot
        self._tasks.spawn("kv events", publisher.run())

    async def _open(self) -> None:
        assert self._engine is not None
        self._hold(self._engine)
        assert self._loops is not None
        self._tasks.spawn("step", self._loops.step())
        self._tasks.spawn("expire", self._loops.expire())
        self._tasks.spawn("watch", self._loops.watch())
        self._tasks.spawn("send", self._loops.send_waiting())
        self._tasks.spawn("beat", self._presence.beat_when_wanted())
        for topic, reader in self._readers.items():
            self._tasks.spawn(f"read {topic}", self._loops.read(reader))
        self._membership.set_state(MemberState.READY)
        await self._membership.update(self._engine.capability)
        await self._presence.try_beat()
        self._publish_kv(self._engine)

    async def _drain(self) -> None:
        """Take no more, finish what is held, wait for handed-over KV, give the rest back."""
        assert self._held is not None
        held, worker_id = self._held, self._membership.member_id
        log.info("%s: draining %d requests", worker_id, len(held))
        held.draining = True
        self._membership.set_state(MemberState.DRAINING)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1000):
                await self._presence.try_beat()
                await self._tasks.until(self._finished(held))
        except TimeoutError:
            log.warning("%s: %d requests left after the drain", worker_id, len(held))
        await self._give_back(WorkerRefused(f"worker {worker_id} is shutting down").to_wire())

    async def _finished(self, held: Held) -> None:
        empty = asyncio.Event()
        held.on_empty = empty.set
        if len(held):
            await empty.wait()
        # Engines have no event for it, hence the look now and then.
        while wall_ms() < held.kv_until_ms and not self._kv_is_gone():  # noqa: ASYNC110
            await asyncio.sleep(HEARTBEAT_MS / 1000)

    def _kv_is_gone(self) -> bool:
        assert self._engine is not None
        figures = self._engine.load().extra
        return any(figures.get(name) == 0 for name in HANDLES_HELD)

    async def _give_back(self, error: WireError) -> None:
        """Report what is held as failed, and wait until all reports are in the log."""
        if self._held is None or self._loops is None:
            return
        self._held.give_back(error, wall_ms())
        try:
            async with asyncio.timeout(self._log_settings.request_timeout_ms / 1000):
                await self._tasks.until(self._loops.settled(), ("outbox", "watch"))
        except TimeoutError:
            raise BrokerUnavailable("the last phases and outcomes were not acknowledged") from None

    async def _give_back_if_possible(self, error: WireError) -> None:
        try:
            await self._give_back(error)
        except TriviumError as failure:  # the router finds out by the missing heartbeats
            log.error("%s: %s", self._membership.member_id, failure.message)

    async def _close(self) -> None:
        if self._held is not None:
            self._held.abandon()
        await self._tasks.cancel()
        self._presence.withdraw()
        request_ms = self._log_settings.request_timeout_ms
        await tasks.close("membership", self._membership.leave(), request_ms)
        if self._engine is not None:
            await tasks.close("engine", self._engine.close(), self._settings.close_timeout_ms)
        for topic, reader in self._readers.items():
            await tasks.close(f"reader of {topic}", reader.stop(), request_ms)
        await tasks.close("token producer", self._clients.tokens.stop(), request_ms)
        await tasks.close("durable producer", self._clients.durable.stop(), request_ms)
