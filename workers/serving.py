"""One life of a worker: joins the fleet, serves with an engine that is up, drains and leaves.

`workers/runtime.py` keeps the engine and begins the next life where this one is lost: `serve` then
raises a LeaseError, BrokerUnavailable or KafkaError, what was held is aborted, and nothing of it is
written any more. The loops are in `workers/loops.py`, the rules in `workers/llm/held.py`.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence

from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, EngineDead, TriviumError, WorkerRefused
from schemas.fleet import HEARTBEAT_MS
from schemas.log.clients import AssignedReader
from schemas.log.clock import wall_ms
from schemas.records import MemberState, Role, WireError
from schemas.settings import LogSettings, ModelSettings
from workers import tasks
from workers.config import WorkerSettings
from workers.draining import finished
from workers.kv_events import KvEventsPublisher
from workers.llm.engine import Engine
from workers.llm.frames import Frames
from workers.llm.held import Held, Limits
from workers.llm.stream import Identity
from workers.log_clients import LogClients
from workers.loops import Loops
from workers.outbox import Outbox
from workers.presence import Presence
from workers.roles import RoleOrders, lease_topics

log = logging.getLogger("trivium.worker")


class Life:
    """`meet`, then `serve`, and `close` in any case."""

    def __init__(
        self,
        clients: LogClients,
        log_settings: LogSettings,
        settings: WorkerSettings,
        model: ModelSettings,
        roles: Sequence[Role],
        *,
        former_epoch: int,
    ) -> None:
        self.roles = tuple(roles)  # at present
        self._clients = clients
        self._log_settings = log_settings
        self._settings = settings
        self._model = model
        self._presence = Presence(lambda on: clients.membership(on, self.roles, former_epoch))
        self._membership = self._presence.membership
        self._tasks = tasks.Tasks()
        self._readers: dict[str, AssignedReader] = {}
        self._engine: Engine | None = None
        self._held: Held | None = None
        self._loops: Loops | None = None
        self._settled = False  # all that this life had to say is in the log

    async def meet(self) -> int:
        """Connect, and take an epoch; it comes before an engine that may take long to start."""
        await self._clients.durable.start()
        await self._clients.tokens.start()
        await self._membership.meet()
        return self._membership.epoch

    async def serve(self, engine: Engine, stop: asyncio.Event) -> None:
        """Join, serve until `stop`, and drain; see the module's docstring for other ends."""
        self._engine = engine
        try:
            await self._join()
            await self._open()
            await self._tasks.until(stop.wait())
            await self._drain()
        except EngineDead as error:
            log.error("%s: %s", self._membership.member_id, error.message)
            await self._give_back_if_possible(error.to_wire())
            raise

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

    def _hold(self, engine: Engine) -> None:
        """Build what serves the engine's capacity."""
        membership, clients, settings = self._membership, self._clients, self._settings
        capacities = self._capacities(engine, self.roles)
        held_max = 2 * sum(capacities.values())
        identity = Identity(worker_id=membership.member_id, epoch=membership.epoch)
        limits = Limits(
            roles=frozenset(self.roles),
            model=self._model.served_name,
            held_max=held_max,
            seen_max=max(settings.seen_max, 4 * held_max),
            gateway_partitions=self._log_settings.gateway_partitions,
            prefill_running_max=settings.prefill_running_max,
        )
        frames = Frames(identity.worker_id)
        outbox = Outbox(
            clients.durable,
            membership.stands,
            pending_max=settings.reports_pending_max,
            tries_max=settings.report_tries_max,
        )
        self._tasks.spawn("outbox", outbox.run())
        presence = self._presence
        self._held = Held(engine, identity, limits, frames, outbox.add, presence)
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
            self._take(self._engine, self._held, {*self.roles, *roles})
            self._presence.offer(self._capacities(self._engine, roles))
            await self._membership.update(self._engine.capability, roles)
        except KafkaError as error:
            raise BrokerUnavailable(f"roles were not changed: {error}") from error
        self.roles = tuple(roles)
        await self._presence.try_beat()
        await asyncio.sleep(HEARTBEAT_MS / 1000)
        self._take(self._engine, self._held, roles)

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
        assert self._engine is not None
        held, worker_id = self._held, self._membership.member_id
        log.info("%s: draining %d requests", worker_id, len(held))
        held.draining = True
        self._membership.set_state(MemberState.DRAINING)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1000):
                await self._presence.try_beat()
                await self._tasks.until(finished(held, self._engine))
        except TimeoutError:
            log.warning("%s: %d requests left after the drain", worker_id, len(held))
        await self._give_back(WorkerRefused(f"worker {worker_id} is shutting down").to_wire())

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
        self._settled = True

    async def _give_back_if_possible(self, error: WireError) -> None:
        try:
            await self._give_back(error)
        except TriviumError as failure:  # the router finds out by the missing heartbeats
            log.error("%s: %s", self._membership.member_id, failure.message)

    async def close(self) -> None:
        """Abort what is held, leave if that is known to be in order, and close the log's clients.

        What a lost life has not written must not be written later: another may do its work by now.
        """
        if self._held is not None:
            self._held.abandon()
        await self._tasks.cancel()
        self._presence.withdraw()
        request_ms = self._log_settings.request_timeout_ms
        await tasks.close("membership", self._membership.leave(), request_ms)
        parts = {f"reader of {topic}": reader.stop() for topic, reader in self._readers.items()}
        for name, producer in (("token", self._clients.tokens), ("durable", self._clients.durable)):
            closing = producer.stop() if self._settled else producer.discard()
            parts[f"{name} producer"] = closing
        await asyncio.gather(*(tasks.close(what, part, request_ms) for what, part in parts.items()))
