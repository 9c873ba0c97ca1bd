"""One incarnation of a worker: it joins the fleet, serves, drains and ends.

`workers/runtime.py` creates a `Serving` for each incarnation once the engine is up. `run` raises
LeaseError, BrokerUnavailable or KafkaError if the incarnation is lost. Its active requests are then
aborted, and it writes nothing more. The loops are in `workers/loops.py`, the rules in
`workers/llm/active_requests.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, EngineDead, TriviumError, WorkerRefused
from schemas.fleet import HEARTBEAT_MS
from schemas.records import MemberState, Role, WireError
from schemas.settings import LogSettings, ModelSettings
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership, OnRecord
from streams.log.retrieval.client import RetrievalClient
from workers import tasks
from workers.config import WorkerSettings
from workers.kv_events import KvEventsPublisher
from workers.llm.active_requests import SEEN_MAX, ActiveRequests, RequestLimits
from workers.llm.engine import Engine
from workers.llm.frames import Frames
from workers.llm.parsing.parsers import Parsers
from workers.llm.probing.jobs import ProbingJobs
from workers.llm.probing.triggers import installed_triggers
from workers.llm.stream import WorkerIdentity
from workers.loops import Loops
from workers.outbox import ReportOutbox
from workers.presence import Presence
from workers.probes import Prober
from workers.roles import RoleOrders, lease_topics

log = logging.getLogger("trivium.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogClients:
    """The log's clients, shared by all incarnations; each of these starts the producers."""

    codec: Codec
    durable: LogProducer
    tokens: LogProducer
    membership: Callable[[OnRecord, Sequence[Role], int], Membership]  # roles, former epoch
    reader: Callable[[str, int], AssignedReader]  # of a topic and partition
    retrieval_client: Callable[[Membership], RetrievalClient]  # of a member with a lease on `hits`


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """The sections of the settings that a worker uses."""

    log: LogSettings
    worker: WorkerSettings
    model: ModelSettings


class Serving:
    """One incarnation. The caller awaits `run`, then `abandon` in any case, and closes `readers`
    and the log's clients."""

    def __init__(
        self,
        clients: LogClients,
        settings: ServingSettings,
        presence: Presence,
        engine: Engine,
        roles: Sequence[Role],
        parsers: Parsers | None = None,
    ) -> None:
        self.roles = tuple(roles)  # current ones
        self.is_settled = False  # all reports of this incarnation are in the log
        self._clients = clients
        self._settings = settings
        self._presence = presence
        self._membership = membership = presence.membership
        self._engine = engine
        self._capability = replace(engine.capability, triggers=tuple(installed_triggers()))
        self._identity = WorkerIdentity(worker_id=membership.member_id, epoch=membership.epoch)
        self._tasks = tasks.Tasks()
        self.readers: dict[str, AssignedReader] = {}
        frames = Frames(self._identity.worker_id)
        self._outbox = ReportOutbox(
            clients.durable,
            membership.wait_until_valid,
            on_written=lambda record: self._loops.record_written(record),
        )
        self._prober = Prober(
            clients.retrieval_client,
            membership,
            lambda result, seeds: self._loops.take_result(result, seeds),
        )
        self._probing = ProbingJobs(
            engine,
            self._prober.ask,
            self._outbox.add,
            model_len=engine.capability.max_model_len,
        )
        self._requests = ActiveRequests(
            self._probing,
            self._identity,
            self._limits(),
            frames,
            self._outbox.add,
            presence,
            parsers,
        )
        self._orders = RoleOrders(self._identity, self._capability, self._assign)
        self._loops = Loops(
            codec=clients.codec,
            durable=clients.durable,
            tokens=clients.tokens,
            membership=membership,
            engine=engine,
            probing=self._probing,
            prober=self._prober,
            requests=self._requests,
            frames=frames,
            outbox=self._outbox,
            assign=self._orders.take,
        )

    def _limits(self) -> RequestLimits:
        settings, held_max = self._settings.worker, self._held_max(self.roles)
        return RequestLimits(
            roles=frozenset(self.roles),
            model=self._settings.model.served_name,
            held_max=held_max,
            seen_max=max(SEEN_MAX, 4 * held_max),
            gateway_partitions=self._settings.log.gateway_partitions,
            prefill_running_max=settings.prefill_running_max,
            adapters=frozenset(self._engine.capability.adapters),
        )

    def _capacities(self, roles: Collection[Role]) -> dict[Role, int]:
        running_max = self._engine.capability.running_max
        prefill = self._settings.worker.prefill_credits or running_max
        rest = self._settings.worker.decode_credits or running_max
        return {role: prefill if role is Role.PREFILL else rest for role in roles}

    def _held_max(self, roles: Collection[Role]) -> int:
        return 2 * sum(self._capacities(roles).values())

    async def run(self, stop: asyncio.Event) -> None:
        """Join, serve until `stop` is set, and drain; the module docstring lists the errors."""
        try:
            await self._join()
            await self._open()
            await self._tasks.until(stop.wait())
            await self._drain()
        except EngineDead as error:
            log.error("%s: %s", self._identity.worker_id, error.message)
            await self._give_back_if_possible(error.to_wire())
            raise

    async def _join(self) -> None:
        """Join the fleet. The engine is up: its start may block the machine longer than a lease."""
        await self._membership.join(self._capability)
        self._tasks.spawn("membership", self._membership.run())
        for topic, partition in self._membership.leases.items():
            await self._open_reader(topic, partition)

    async def _open_reader(self, topic: str, partition: int) -> AssignedReader:
        reader = self.readers[topic] = self._clients.reader(topic, partition)
        await reader.start("latest")  # older work was for the partition's former owner
        return reader

    async def _open(self) -> None:
        capacities = self._capacities(self.roles)
        self._presence.serve(self._engine, self._requests, self._probing, capacities)
        self._tasks.spawn("outbox", self._outbox.run())
        self._tasks.spawn("roles", self._orders.run())
        self._tasks.spawn("probes", self._prober.run())
        self._tasks.spawn("step", self._loops.step())
        self._tasks.spawn("catch up", self._loops.catch_up())
        self._tasks.spawn("expire", self._loops.expire())
        self._tasks.spawn("watch", self._loops.watch())
        self._tasks.spawn("send", self._loops.send_waiting())
        self._tasks.spawn("beat", self._presence.beat_when_wanted())
        for topic, reader in self.readers.items():
            self._tasks.spawn(f"read {topic}", self._loops.read(reader))
        self._membership.set_state(MemberState.READY)
        await self._membership.update(self._capability)
        await self._presence.try_beat()
        self._publish_kv()

    def _publish_kv(self) -> None:
        blocks = self._engine.block_log
        if blocks is None:
            return
        publisher = KvEventsPublisher(
            blocks,
            self._clients.tokens,
            self._identity,
            self._membership.is_valid,
        )
        self._presence.on_router = publisher.want_snapshot
        self._tasks.spawn("kv events", publisher.run())

    async def _assign(self, roles: Sequence[Role]) -> None:
        """Change the roles: lease partitions, offer credits, then announce the roles to the fleet.

        Work of former roles is accepted for one more heartbeat interval, because routers may have
        sent it before they read the new roles.
        """
        try:
            for topic in lease_topics(roles):
                if topic not in self.readers:
                    partition = await self._membership.lease(topic)
                    reader = await self._open_reader(topic, partition)
                    self._tasks.spawn(f"read {topic}", self._loops.read(reader))
            self._take({*self.roles, *roles})
            self._presence.offer(self._capacities(roles))
            await self._membership.update(self._capability, roles)
        except KafkaError as error:
            raise BrokerUnavailable(f"roles were not changed: {error}") from error
        self.roles = tuple(roles)
        await self._presence.try_beat()
        await asyncio.sleep(HEARTBEAT_MS / 1000)
        self._take(roles)

    def _take(self, roles: Collection[Role]) -> None:
        self._requests.assign(roles, self._held_max(roles))

    async def _drain(self) -> None:
        """Refuse new work, finish active requests, wait for handed-over KV, give back the rest."""
        requests, worker_id = self._requests, self._identity.worker_id
        log.info("%s: draining %d requests", worker_id, len(requests))
        requests.draining = True
        self._membership.set_state(MemberState.DRAINING)
        try:
            async with asyncio.timeout(self._settings.worker.drain_timeout_ms / 1000):
                await self._presence.try_beat()
                await self._tasks.until(self._wait_finished())
        except TimeoutError:
            log.warning("%s: %d requests left after the drain", worker_id, len(requests))
        await self._give_back(WorkerRefused(f"worker {worker_id} is shutting down").to_wire())

    async def _wait_finished(self) -> None:
        """Wait until no request is active, and all handed-over KV was read or has expired."""
        requests, empty = self._requests, asyncio.Event()
        requests.on_empty = empty.set
        if len(requests):
            await empty.wait()
        # Engines have no event for it, so this polls.
        while wall_ms() < requests.kv_until_ms and self._engine.load().kv_handles_held:  # noqa: ASYNC110
            await asyncio.sleep(HEARTBEAT_MS / 1000)

    async def _give_back(self, error: WireError) -> None:
        """Report active requests as failed, and wait until all reports are in the log."""
        self._requests.give_back(error, wall_ms())
        try:
            async with asyncio.timeout(self._settings.log.request_timeout_ms / 1000):
                await self._tasks.until(self._loops.wait_settled(), ("outbox", "watch"))
        except TimeoutError:
            raise BrokerUnavailable("the last phases and outcomes were not acknowledged") from None
        self.is_settled = True

    async def _give_back_if_possible(self, error: WireError) -> None:
        try:
            await self._give_back(error)
        except TriviumError as failure:  # routers detect the loss by the missing heartbeats
            log.error("%s: %s", self._identity.worker_id, failure.message)

    async def abandon(self) -> None:
        """Abort active requests and end all tasks. Unwritten records are dropped, because another
        worker may have these requests by now.
        """
        self._requests.abandon()
        await self._tasks.cancel()
        await self._prober.stop()
        self._presence.withdraw()
