"""A retrieval worker process: one shard of all collections, between Kafka and the search engine.

Theory of operation. The worker joins the fleet, loads its snapshots if there are any, reads the
rest of `documents` and `passages`, and links new rows. Then its Faust agents join the consumer
group of the shard's replicas, and pass retrievals to the engine in the same process. The worker is
ready when the group has assigned partitions to it. It continues to read documents, and links rows
without edges in the background. A drain takes no more retrievals, answers those in flight, and
leaves the group. If the worker loses the log or its lease, it joins again, keeps its documents, and
resumes reading at its offsets.
"""

import asyncio
import logging
import sys

from schemas.codec import Codec
from schemas.records import (
    Heartbeat,
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchCapability,
    SearchLoad,
)
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.faust.app import add_agents, fetched_ends, follow_rebalances, make_app
from streams.log.faust.group import Place
from streams.log.membership import Membership
from streams.log.retry import run_with_reconnect
from workers import tasks
from workers.agent_session import AgentSession
from workers.retrieval import index_files
from workers.retrieval.collections import Collections
from workers.retrieval.feed.documents import DocumentFollower
from workers.retrieval.feed.passages import PassageFollower
from workers.retrieval.feed.refusals import is_first
from workers.retrieval.intake import TOPICS, RetrievalIntake, begin_group, group_id
from workers.retrieval.responder import Responder
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.snapshots import AGE_MAX_MS, Offsets, Snapshots
from workers.retrieval.upkeep import Upkeep
from workers.vector.cuda.batch import BatchSettings, sizes_up_to
from workers.vector.engine import backend
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.kinds import SearchKind

log = logging.getLogger("trivium.retrieval")
_STALL_MS = 30_000  # lag without progress that ends a session
# Seconds for which a thread of documents, snapshots or links keeps the interpreter while the event
# loop waits for it. Python's default of 5 ms would be most of a search's time.
SWITCH_S = 0.000_5
_BUFFERED_MAX = 64  # records that Faust holds for each agent; the rest stays in the log


class RetrievalWorker:
    """The documents and engine of one process, and its membership in the fleet; call `run` once.

    `run` returns when `stop` is set and retrievals in flight are answered; else it raises the error
    that ended it.
    """

    def __init__(
        self,
        log_settings: LogSettings,
        settings: RetrievalSettings,
        place: ShardPlace,
        worker_id: str,
        codec: Codec,
    ) -> None:
        self._log_settings = log_settings
        self._settings = settings
        self._place = place
        self._worker_id = worker_id
        self._codec = codec
        self._producer = LogProducer(log_settings, codec, durable=True, client_id=worker_id)
        graph_of = backend.or_on_cores(
            backend.graph_builder(settings.device, settings.builder, settings.cuda_device)
        )
        self.collections = Collections(settings, graph_of)
        self.collections.serve_files(index_files.read(settings, place, graph_of))
        self.engine = SearchEngine(
            EngineSettings(
                lanes=settings.lanes,
                places=settings.places,
                slots=settings.slots,
                ahead=settings.ahead,
                device=settings.device,
                cuda_device=settings.cuda_device,
                cuda=BatchSettings(
                    slots=settings.cuda_slots,
                    sizes=sizes_up_to(settings.cuda_places),
                    dim_max=settings.cuda_dim_max,
                ),
                scheduler=settings.scheduler(),
            ),  # fmt: skip
            clock_ms=wall_ms,
        )
        self.responder = Responder(
            self.engine, self.collections, settings, worker_id=worker_id, place=place
        )
        self._snapshots = Snapshots(
            settings, self.collections, place, self._offsets,
            worker_id=worker_id, shard_name=group_id(log_settings, place),
            is_first=self._is_first, graph_of=graph_of,
        )  # fmt: skip
        self._upkeep = Upkeep(settings, self.collections, self.engine.neighbours)
        self.membership = self._new_membership()
        parts = (log_settings, codec, self._producer, self.collections, place, self.membership)
        self._documents = DocumentFollower(*parts)
        self._passages = PassageFollower(*parts, read_to=lambda: self._documents.offsets)
        self._steady = tasks.Tasks()  # tasks that outlive a session
        self._left_ms = 0  # when the last session ended

    def _new_membership(self, former_epoch: int = 0) -> Membership:
        return Membership(
            self._log_settings,
            self._codec,
            self._producer,
            member_id=self._worker_id,
            kind=MemberKind.WORKER,
            roles=[Role.RETRIEVAL],
            on_record=self._fleet_record,
            former_epoch=former_epoch,
        )

    def _begin(self) -> None:
        """Make the objects of one session in the fleet."""
        self.membership = self._new_membership(self.membership.epoch)
        self._documents.membership = self._passages.membership = self.membership
        self._intake = RetrievalIntake(
            self._log_settings,
            self._codec,
            self._producer,
            self.responder,
            self._settings.pending_max,
        )
        app = make_app(
            self._log_settings,
            group=group_id(self._log_settings, self._place),
            member_id=self._worker_id,
            buffer_max=_BUFFERED_MAX,
            leaves_group=True,
        )
        prefix = self._log_settings.topic_prefix
        add_agents(app, prefix, "retrieval", tuple(TOPICS), self._intake)
        follow_rebalances(app, prefix, self)
        self._life = AgentSession(
            settings=self._log_settings, membership=self.membership, producer=self._producer,
            app=app, intake=self._intake, give_up=self._intake.cancel,
            drain_timeout_ms=self._settings.drain_timeout_ms,
            close_timeout_ms=self._settings.close_timeout_ms,
        )  # fmt: skip

    async def run(self, stop: asyncio.Event) -> None:
        """Run sessions with the same documents and engine until one has drained."""
        sys.setswitchinterval(SWITCH_S)
        try:
            await run_with_reconnect(self._worker_id, lambda: self._live(stop), stop)
        finally:
            await self._steady.cancel()
            self.responder.texts.close()
            await tasks.close("engine", self.engine.close(), self._settings.close_timeout_ms)

    async def _live(self, stop: asyncio.Event) -> None:
        self._begin()
        try:
            await self._join()
            if not await self._life.tasks.until(tasks.run_unless(stop, self._load())):
                return
            self._serve()
            await self._life.tasks.until(stop.wait())
            await self._life.drain()
            await self._snapshots.save_if_wanted()
        finally:
            await self._life.close(documents=self._documents.stop, passages=self._passages.stop)
            self._left_ms = wall_ms()

    async def _join(self) -> None:
        load = self.engine.load()
        self.membership.search = SearchCapability(
            shard=self._place.shard, shards=self._place.shards, backend=self.engine.backend,
            slots=load.places, place=self._log_settings.place,
        )  # fmt: skip
        self.membership.search_source = self._load_now
        await self._producer.start()
        await self.membership.join()
        self._life.tasks.spawn("membership", self.membership.run())

    async def _load(self) -> None:
        """Read the missing records: those after a snapshot, later those after the last session.

        `AGE_MAX_MS` after the last session everything is read again: the log may no longer have the
        deletions.
        """
        offsets: Offsets | None = self._offsets()
        if not any(self._documents.offsets.values()):
            offsets = await asyncio.to_thread(self._snapshots.load)
        elif wall_ms() - self._left_ms > AGE_MAX_MS:
            offsets = None
        if offsets is not None and not (
            await self._documents.fits(offsets["documents"])
            and await self._passages.fits(offsets["passages"])
        ):
            log.warning("what is held is dropped: the topics of documents are other ones")
            offsets = None
        if offsets is None:
            self.collections.clear()
        await self._documents.start(offsets["documents"] if offsets else None)
        await self._passages.start(offsets["passages"] if offsets else None)
        self.collections.settle()
        if not self._steady.names:
            await self._upkeep.finish()
            self._steady.spawn("snapshots", self._snapshots.run())
            self._steady.spawn("upkeep", self._upkeep.run())
        await begin_group(self._log_settings, self._place)

    def _offsets(self) -> Offsets:
        """Return the next offsets of both topics; passages are never ahead of documents."""
        passages = dict(self._passages.offsets)
        return {"documents": dict(self._documents.offsets), "passages": passages}

    def _is_first(self) -> bool:
        view, now_ms = self.membership.view, wall_ms()
        return is_first(view, self._place, self._worker_id, now_ms, of_ready=True)

    def _serve(self) -> None:
        spawn = self._life.tasks.spawn
        spawn("documents", self._documents.run())
        spawn("refusals", self._documents.refusals.run())
        spawn("passages", self._passages.run())
        spawn("refused passages", self._passages.refusals.run())
        spawn("steady", self._steady.watch())
        self._life.serve(_STALL_MS)

    def on_assigned(self, places: set[Place]) -> None:
        """Serve the assigned partitions; the worker is ready with the first ones."""
        self._intake.group.on_assigned(places)
        partitions = sorted({partition for _, partition in places})
        log.info("shard %s: serves partitions %s", self._place, partitions)
        if self.membership.state is MemberState.STARTING:
            self.membership.set_state(MemberState.READY)

    async def on_revoked(self) -> None:
        """Stop acknowledging retrievals of revoked partitions; those in flight are answered."""
        self._intake.group.on_revoked()

    def _fleet_record(self, record: Registration | Heartbeat, offset: int, now_ms: int) -> None:
        if isinstance(record, Registration):
            self.membership.check_name(record)

    def _load_now(self) -> SearchLoad:
        load, now_ms = self.engine.load(), wall_ms()
        shares = (0.5, 0.95)
        prefill = self.engine.waits_ms(SearchKind.PREFILL, shares, now_ms) or [0.0, 0.0]
        decode = self.engine.waits_ms(SearchKind.DECODE, shares, now_ms) or [0.0, 0.0]
        return SearchLoad(
            running=load.running,
            parked=load.parked,
            occupancy=load.running / load.places,
            waiting_prefill=load.waiting[SearchKind.PREFILL],
            waiting_decode=load.waiting[SearchKind.DECODE],
            ms_per_extend=load.ms_per_extend,
            prefill_wait_ms_p50=prefill[0],
            prefill_wait_ms_p95=prefill[1],
            decode_wait_ms_p50=decode[0],
            decode_wait_ms_p95=decode[1],
            share=self._settings.share,
            flush_ms=self._settings.park_after_ms,
            searches_total=self.responder.tallies.searches,
            misses_total=self.responder.tallies.misses,
            collections=self.collections.states(),
            behind=self._documents.behind + self._passages.behind,
            tallies=self.responder.tallies.to_records(),
            held_back_ms=round(self.collections.held_back_ms),
            answering=self._intake.answering.take_mean(),
            unread=self._unread(),
            documents_done=self._documents.applied_offsets,
            passages_done=self._passages.applied_offsets,
            partitions=self._partitions(),
        )

    def _partitions(self) -> tuple[int, ...]:
        """Return the partitions that it answers for both classes, ascending."""
        owned = self._intake.group.owned
        by_topic = [{number for name, number in owned if name == topic} for topic in TOPICS]
        return tuple(sorted(set.intersection(*by_topic)))

    def _unread(self) -> int:
        group = self._intake.group
        return group.unread_count(
            fetched_ends(self._life.app, self._log_settings.topic_prefix, group.owned)
        )
