"""An embedding worker process: it embeds documents and search texts with one model.

Theory of operation. The process loads the model first, which takes seconds. Then the worker joins
the fleet and reads the operators' declarations of collections. Its Faust agents join the consumer
group of all embedding workers for two topics, `embeddings` and `documents`. The worker is ready
when the group has assigned partitions to it. It reads the existing passages of a partition of
`documents` before it handles a document of it. Queries and documents share one `Batcher`. A drain
takes no more records, finishes those in flight, and leaves the group. If the worker loses the log
or its lease, it joins again with the same model, and resumes at the group's offsets.
"""

import asyncio
import logging
from typing import Final

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable
from schemas.records import EmbedCapability, EmbedLoad, MemberKind, MemberState, Role
from schemas.settings import LogSettings, ModelSettings
from streams.log.clients import LogProducer
from streams.log.documents import embedding_group
from streams.log.faust.app import add_agents, follow_rebalances, make_app
from streams.log.faust.crash_notes import CrashNotes
from streams.log.faust.group import Place, commit_start_offsets
from streams.log.membership import Membership
from streams.log.retry import run_with_reconnect
from workers import tasks
from workers.agent_session import AgentSession
from workers.embed.batcher import Batcher
from workers.embed.catalog import ChunkingDeclarations, PassageCatalog, default_cutting
from workers.embed.content import Tokens
from workers.embed.documents import DocumentWork, Totals, Unfinished
from workers.embed.embedders.choose import make_embedder
from workers.embed.embedders.protocol import Embedder
from workers.embed.embedders.served_tokens import ServedTokens
from workers.embed.intake import EmbeddingIntake
from workers.embed.pools import EmbeddingPool, pool_of
from workers.embed.queries import TOPIC, QueryWork
from workers.embed.settings import SERVED, EmbeddingSettings

log = logging.getLogger("trivium.embedding")
DOCUMENTS = "documents"
_STALL_MS = 60_000  # lag without progress that ends a session; a long document takes seconds
_BUFFERED_MAX = 64  # records that Faust holds for each agent; the rest stays in the log
# Records in flight; further ones wait in the log. A document has many texts, a query has one.
_IN_FLIGHT_MAX: Final = {TOPIC: 4_096, DOCUMENTS: 128}
FIRST_POOL: Final = EmbeddingPool()
_SPECIAL_TOKENS = 2  # tokens that a model puts around a text


class EmbeddingWorker:
    """The model of one process and its membership in the fleet; call `run` once."""

    def __init__(
        self,
        log_settings: LogSettings,
        settings: EmbeddingSettings,
        embedder: Embedder,
        worker_id: str,
        codec: Codec,
        *,
        tokens: Tokens | None = None,
        tokenizer: str = "",
        pool: EmbeddingPool = FIRST_POOL,
    ) -> None:
        """Set up a worker of a pool; `tokens` returns the served model's token ids, `tokenizer`
        names it."""
        self._pool, self._group = pool, embedding_group(log_settings, pool.name)
        self._log_settings, self._settings = log_settings, settings
        self._worker_id, self._codec = worker_id, codec
        self._tokens = tokens
        self._cutting = default_cutting(settings, embedder.name, tokenizer)
        self._producer = LogProducer(log_settings, codec, durable=True, client_id=worker_id)
        self.batcher = Batcher(embedder, settings.batch_tokens)
        self.totals = Totals()
        self._unfinished = Unfinished()
        self._falls = CrashNotes(log_settings, self._group)
        self.membership = self._new_membership()
        self._steady = tasks.Tasks()  # tasks that outlive a session

    def _new_membership(self, former_epoch: int = 0) -> Membership:
        return Membership(
            self._log_settings,
            self._codec,
            self._producer,
            member_id=self._worker_id,
            kind=MemberKind.WORKER,
            roles=[Role.EMBEDDING],
            former_epoch=former_epoch,
        )

    def _begin(self) -> None:
        """Make the objects of one session in the fleet."""
        log_settings, codec, name = self._log_settings, self._codec, self._worker_id
        self.membership = self._new_membership(self.membership.epoch)
        self.catalog = PassageCatalog(log_settings, codec, name)
        seen_max = self.batcher.embedder.tokens_max - _SPECIAL_TOKENS
        self._declarations = ChunkingDeclarations(
            log_settings, codec, name, self._cutting, seen_max, self._pool
        )
        self._documents = DocumentWork(
            log_settings, codec, self._producer, self.batcher, self.catalog, self._declarations,
            self._tokens, self.totals, self.membership, self._unfinished,
        )  # fmt: skip
        queries = QueryWork(
            log_settings, codec, self._producer, self.batcher, self._declarations, self.totals, name
        )
        self._intake = EmbeddingIntake(
            self._producer,
            {TOPIC: queries.handle, DOCUMENTS: self._documents.handle},
            _IN_FLIGHT_MAX,
            self._falls,
        )
        app = make_app(
            log_settings,
            group=self._group,
            member_id=name,
            buffer_max=_BUFFERED_MAX,
            leaves_group=True,
        )
        prefix = log_settings.topic_prefix
        add_agents(app, prefix, "embedding", (TOPIC, DOCUMENTS), self._intake)
        follow_rebalances(app, prefix, self)
        self._falls.begin_life(app)
        self._session = AgentSession(
            settings=log_settings, membership=self.membership, producer=self._producer,
            app=app, intake=self._intake, give_up=self._give_up,
        )  # fmt: skip

    async def run(self, stop: asyncio.Event) -> None:
        """Run sessions with the same model, one after the other, until one has drained."""
        self._steady.spawn("batches", self.batcher.run())
        try:
            await run_with_reconnect(self._worker_id, lambda: self._live(stop), stop)
        finally:
            await self._unfinished.close()
            await self._steady.cancel()
            await asyncio.to_thread(self.batcher.close)

    async def _live(self, stop: asyncio.Event) -> None:
        self._begin()
        try:
            await self._join()
            self._serve()
            await self._session.tasks.until(stop.wait())
            await self._session.drain()
            await self._falls.forgive()
        except (BrokerUnavailable, KafkaError, OSError):
            await self._falls.forgive()
            raise
        finally:
            await self._session.close(declarations=self._declarations.stop)

    async def _join(self) -> None:
        embedder = self.batcher.embedder
        self.membership.embedding = EmbedCapability(
            embedder=embedder.name,
            dim=embedder.dim,
            tokens_max=embedder.tokens_max,
            pool=self._pool.name,
        )
        self.membership.embedding_source = self._load_now
        await self._producer.start()
        await self.membership.join()
        self._session.tasks.spawn("membership", self.membership.run())
        await self._declarations.start()
        await commit_start_offsets(self._log_settings, self._group, [TOPIC])

    def _serve(self) -> None:
        self._session.tasks.spawn("steady", self._steady.watch())
        self._session.tasks.spawn("declarations", self._declarations.run())
        self._session.serve(_STALL_MS)

    def on_assigned(self, places: set[Place]) -> None:
        """Load the passages of the assigned partitions; the worker is ready with the first ones."""
        group = self._intake.group
        group.on_assigned(places)
        self._falls.on_assigned(places)
        log.info("embeds for %s", sorted(places))
        loading = self._documents.load({number for topic, number in places if topic == DOCUMENTS})

        def loaded(loading: asyncio.Future[None]) -> None:
            if not loading.cancelled() and (error := loading.exception()) is not None:
                group.fail(error)

        loading.add_done_callback(loaded)
        if self.membership.state is MemberState.STARTING:
            self.membership.set_state(MemberState.READY)

    async def on_revoked(self) -> None:
        """Stop writing passages of the revoked partitions; queries in flight are forwarded, but
        not acknowledged."""
        self._intake.group.on_revoked()
        await self._give_up(DOCUMENTS)
        await self._falls.forgive()

    async def _give_up(self, *topics: str) -> None:
        await self._intake.cancel(*topics)
        await self._documents.give_up()

    def _load_now(self) -> EmbedLoad:
        return EmbedLoad(
            waiting=self.batcher.waiting,
            queries_total=self.totals.queries,
            chunks_total=self.totals.chunks,
            documents_total=self.totals.documents,
            unchanged_total=self.totals.unchanged,
            ms_per_text=self.batcher.ms_per_text,
        )


async def run_embedding(
    log_settings: LogSettings,
    settings: EmbeddingSettings,
    model: ModelSettings,
    *,
    engine: str,
    worker_id: str,
    stop: asyncio.Event,
    codec: Codec,
    pool: str = "",
) -> None:
    """Serve until `stop` is set and the work in flight is done; raise the error that ends it else.

    `engine` is the deployment's; with simulated engines the default is the light embedder. `pool`
    names one of [[embedding.pools]]; empty: the first model's.
    """
    settings, embedding_pool = pool_of(settings, pool)
    embedder = await asyncio.to_thread(make_embedder, settings, engine)
    embedding_pool.check_embedder(embedder.name)
    served = None
    if settings.tokenizer == SERVED:
        served = await asyncio.to_thread(ServedTokens, model)
    worker = EmbeddingWorker(
        log_settings,
        settings,
        embedder,
        worker_id,
        codec,
        tokens=served.ids if served else None,
        tokenizer=served.name if served else "",
        pool=embedding_pool,
    )
    await worker.run(stop)
