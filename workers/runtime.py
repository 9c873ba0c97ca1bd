"""A worker process between Kafka and an engine: one engine, one incarnation after another.

The command line calls `run_worker`, which returns after a drain. An incarnation ends when its lease
ends or the broker fails. Engine, model and prefix cache stay, and the next incarnation has a higher
epoch. A TriviumError is raised if a new incarnation would not help; the launcher then starts
another process. `workers/serving.py` runs an incarnation once the engine is up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from schemas.codec import Codec
from schemas.records import MemberKind, Role
from schemas.settings import LogSettings, ModelSettings
from streams.log.clients import AssignedReader, LogProducer
from streams.log.membership import Membership
from streams.log.retrieval.client import RetrievalClient
from streams.log.retry import run_with_reconnect
from workers import tasks
from workers.config import WorkerSettings
from workers.llm.engine import Engine, KnowsPeers
from workers.llm.parsing.parsers import Parsers, load_parsers
from workers.presence import Presence
from workers.roles import lease_topics
from workers.serving import LogClients, Serving, ServingSettings

EngineSource = Engine | Callable[[int], Awaitable[Engine]]  # the argument is the worker's epoch


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
    """Serve until `stop` is set and the active requests have ended.

    `engine` is a started engine, or an async function that starts one for the worker's epoch. The
    engine is closed at the end in any case. The worker joins the fleet when its engine is up.
    """
    codec = codec or Codec()
    lease_topics(roles)  # raises ConfigError if the roles are invalid
    durable = LogProducer(log_settings, codec, durable=True, client_id=worker_id)
    clients = LogClients(
        codec=codec,
        durable=durable,
        tokens=LogProducer(log_settings, codec, durable=False, client_id=f"{worker_id}-tokens"),
        membership=lambda on_record, now, former_epoch: Membership(
            log_settings,
            codec,
            durable,
            member_id=worker_id,
            kind=MemberKind.WORKER,
            roles=now,
            lease_topics=lease_topics(now),
            on_record=on_record,
            former_epoch=former_epoch,
        ),
        reader=lambda topic, partition: AssignedReader(
            log_settings,
            topic,
            [partition],
            client_id=f"{worker_id}-{topic}",
            committed_group=f"{topic}-workers",
        ),
        retrieval_client=lambda membership: RetrievalClient(
            log_settings, codec, durable, membership
        ),
    )
    settings = ServingSettings(log=log_settings, worker=worker, model=model)
    await WorkerProcess(clients, settings, roles, worker_id=worker_id).run(engine, stop)


class WorkerProcess:
    """The state that all incarnations of a worker share; call `run` once."""

    def __init__(
        self,
        clients: LogClients,
        settings: ServingSettings,
        roles: Sequence[Role],
        *,
        worker_id: str,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._roles = tuple(roles)  # of the latest incarnation
        self._worker_id = worker_id
        self._epoch = 0
        self._engine: Engine | None = None  # until it is up
        self._parsers: Parsers | None = None

    async def run(self, engine: EngineSource, stop: asyncio.Event) -> None:
        """Run incarnations until one has drained; raise errors that another would not repair."""
        try:
            await run_with_reconnect(self._worker_id, lambda: self._live(engine, stop), stop)
        finally:
            if self._engine is not None:
                await tasks.close("engine", self._engine.close())

    async def _live(self, source: EngineSource, stop: asyncio.Event) -> None:
        """Read the fleet, take an epoch, start the engine, which may take long, and serve."""
        clients = self._clients
        serving: Serving | None = None
        presence = Presence(lambda on: clients.membership(on, self._roles, self._epoch))
        try:
            await clients.durable.start()
            await clients.tokens.start()
            await presence.membership.meet()
            self._epoch = presence.membership.epoch
            engine = await self._engine_up(source, stop)
            if engine is not None:
                serving = Serving(
                    clients, self._settings, presence, engine, self._roles, self._parsers
                )
                await serving.run(stop)
        finally:
            await self._end_life(presence, serving)

    async def _engine_up(self, source: EngineSource, stop: asyncio.Event) -> Engine | None:
        """Return the engine, started now or earlier; None if `stop` was set meanwhile."""
        if self._engine is not None:
            if isinstance(self._engine, KnowsPeers):
                self._engine.begin_epoch(self._epoch)
        elif not callable(source):
            self._engine = source
        else:
            await tasks.run_unless(stop, self._start(source(self._epoch)))
        return self._engine

    async def _start(self, engine: Awaitable[Engine]) -> None:
        self._engine = await engine  # `run` closes it, even if it was never used
        self._parsers = await load_parsers(self._settings.model)

    async def _end_life(self, presence: Presence, serving: Serving | None) -> None:
        """Leave the fleet and close the log's clients.

        If the incarnation was lost, its unwritten records are discarded: another worker may have
        its requests by now.
        """
        is_settled = serving is not None and serving.is_settled
        request_ms = self._settings.log.request_timeout_ms
        closing: dict[str, Coroutine[Any, Any, None]] = {}
        if serving is not None:
            self._roles = serving.roles
            await serving.abandon()
        await tasks.close("membership", presence.membership.leave(), request_ms)
        if serving is not None:
            closing = {f"reader of {t}": reader.stop() for t, reader in serving.readers.items()}
        for name, producer in (("token", self._clients.tokens), ("durable", self._clients.durable)):
            closing[f"{name} producer"] = producer.stop() if is_settled else producer.discard()
        await asyncio.gather(*(tasks.close(what, c, request_ms) for what, c in closing.items()))
