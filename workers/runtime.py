"""A worker process between Kafka and an engine: one engine, one life in the fleet after another.

`run_worker` is what the command line calls; it returns after a drain. A life ends with its lease or
with the broker; then engine, model and prefix cache stay, and the next life has a higher epoch. A
TriviumError is raised where that cannot help, so that the launcher starts another process. A life
is in `workers/serving.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from schemas.codec import Codec
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.membership import Membership
from schemas.log.patience import outlive
from schemas.records import MemberKind, Role
from schemas.settings import LogSettings, ModelSettings
from workers import tasks
from workers.config import WorkerSettings
from workers.llm.engine import Engine
from workers.log_clients import LogClients
from workers.roles import lease_topics
from workers.serving import Life

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
    )
    process = Worker(clients, log_settings, worker, model, roles, worker_id=worker_id)
    await process.run(engine, stop)


class Worker:
    """What a worker's lives have in common; `run` once."""

    def __init__(
        self,
        clients: LogClients,
        log_settings: LogSettings,
        settings: WorkerSettings,
        model: ModelSettings,
        roles: Sequence[Role],
        *,
        worker_id: str,
    ) -> None:
        self._clients = clients
        self._log_settings = log_settings
        self._settings = settings
        self._model = model
        self._roles = tuple(roles)
        self._worker_id = worker_id
        self._epoch = 0
        self._engine: Engine | None = None

    async def run(self, engine: EngineSource, stop: asyncio.Event) -> None:
        """Life after life, until one is drained; raises what no further life would mend."""
        try:
            await outlive(self._worker_id, lambda: self._live(engine, stop), stop)
        finally:
            if self._engine is not None:
                close_ms = self._settings.close_timeout_ms
                await tasks.close("engine", self._engine.close(), close_ms)

    async def _live(self, source: EngineSource, stop: asyncio.Event) -> None:
        life = Life(
            self._clients,
            self._log_settings,
            self._settings,
            self._model,
            self._roles,
            former_epoch=self._epoch,
        )
        try:
            self._epoch = await life.meet()
            if self._engine is not None:
                self._begin_anew(self._engine)
            elif not await self._start_engine(source, stop):
                return
            assert self._engine is not None
            await life.serve(self._engine, stop)
        finally:
            self._roles = life.roles
            await life.close()

    def _begin_anew(self, engine: Engine) -> None:
        """An engine that makes handles has to know whose life they are of: `begin_life`."""
        begin_life = getattr(engine, "begin_life", None)
        if begin_life is not None:
            begin_life(self._epoch)

    async def _start_engine(self, source: EngineSource, stop: asyncio.Event) -> bool:
        if not callable(source):
            self._engine = source
            return True
        starting = asyncio.ensure_future(source(self._epoch))
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
