"""A worker process between Kafka and an engine: one engine, one life in the fleet after another.

`run_worker` is what the command line calls; it returns after a drain. A life ends with its lease or
with the broker; then engine, model and prefix cache stay, and the next life has a higher epoch. A
TriviumError is raised where that cannot help, so that the launcher starts another process. What
happens in a life once the engine is up is in `workers/serving.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from schemas.codec import Codec
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.membership import Membership
from schemas.log.retrieval.client import RetrievalClient
from schemas.log.retry import run_with_reconnect
from schemas.records import MemberKind, Role
from schemas.settings import LogSettings, ModelSettings
from workers import tasks
from workers.config import WorkerSettings
from workers.llm.engine import Engine, KnowsPeers
from workers.presence import Presence
from workers.roles import lease_topics
from workers.serving import LogClients, Serving, ServingSettings

EngineSource = Engine | Callable[[int], Awaitable[Engine]]  # by the worker's epoch


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
    lease_topics(roles)  # raises where they make no worker
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
    """What a worker's lives have in common; `run` once."""

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
        self._roles = tuple(roles)  # at present
        self._worker_id = worker_id
        self._epoch = 0
        self._engine: Engine | None = None  # until it is up

    async def run(self, engine: EngineSource, stop: asyncio.Event) -> None:
        """Life after life, until one is drained; raises what no further life would mend."""
        try:
            await run_with_reconnect(self._worker_id, lambda: self._live(engine, stop), stop)
        finally:
            if self._engine is not None:
                close_ms = self._settings.worker.close_timeout_ms
                await tasks.close("engine", self._engine.close(), close_ms)

    async def _live(self, source: EngineSource, stop: asyncio.Event) -> None:
        """Meet the fleet, then bring the engine up, which may take long, and serve."""
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
                serving = Serving(clients, self._settings, presence, engine, self._roles)
                await serving.run(stop)
        finally:
            await self._end_life(presence, serving)

    async def _engine_up(self, source: EngineSource, stop: asyncio.Event) -> Engine | None:
        """The engine, of an earlier life or started now; None: stopped meanwhile."""
        if self._engine is not None:
            if isinstance(self._engine, KnowsPeers):
                self._engine.begin_epoch(self._epoch)
        elif not callable(source):
            self._engine = source
        else:
            await tasks.run_unless(stop, self._start(source(self._epoch)))
        return self._engine

    async def _start(self, engine: Awaitable[Engine]) -> None:
        self._engine = await engine  # to be closed, if not to be used

    async def _end_life(self, presence: Presence, serving: Serving | None) -> None:
        """Leave if that is known to be in order, and close the log's clients.

        What a lost life has not written must not be written later: another may do its work by now.
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
