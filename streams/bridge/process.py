"""The bridge process: a client of the routers that keeps all state in the log.

In the fleet it is a gateway without an address; Faust's consumer group assigns its partitions.
After every fault of the log it joins both again, and reads its state from the log.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, LeaseError
from schemas.records import MemberKind
from schemas.settings import LogSettings, ModelSettings
from schemas.topics import DEAD_LETTER_SUFFIX, TOPICS
from streams.bridge.answers import AnswerBuilder
from streams.bridge.app import group_id, make_app
from streams.bridge.config import BridgeSettings, TopicPair, pairs_of
from streams.bridge.documents.feed import feed_documents
from streams.bridge.limits import TopicLimits
from streams.bridge.partition_processor import PartitionProcessor, ProcessorContext
from streams.bridge.partitions import BridgePartitions
from streams.bridge.pending_prompt import PairIO
from streams.bridge.prompts import PromptParser
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.bridge.submitter import Submitter
from streams.bridge.turns.slots import ModelSlots, limit
from streams.calls.config import GatewaySettings
from streams.calls.process import CallProcess, load_models
from streams.log.admin import bytes_max_of, create_extra_topics
from streams.log.cancellation import cancel_and_wait, run_within
from streams.log.faust.app import run_app
from streams.log.faust.group import Group
from streams.log.reading.faults import FAULTS
from streams.log.retry import TRANSIENT_ERRORS, run_with_reconnect
from streams.openai.objects.log import ObjectLog

logger = logging.getLogger(__name__)
_LOOK_S = 0.25
_JOIN_S = 30.0
_WIND_UP_S = 10.0
_STALL_MS = 15_000
_SUBJECT = "answering prompts"  # its name in heartbeats that report a failure


class Bridge:
    """The state of a bridge process that outlives its memberships in the group."""

    def __init__(
        self,
        log: LogSettings,
        settings: BridgeSettings,
        process: CallProcess,
        objects: ObjectLog,
        codec: Codec,
        bridge_id: str,
    ) -> None:
        self.log, self.settings, self.codec = log, settings, codec
        self.process, self.bridge_id = process, bridge_id
        self.slots = ModelSlots(process.calls.models.models, self._limit)
        self.submitter = Submitter(process, lambda: objects.table, log.topic_prefix)
        self.pair_ios: Mapping[str, PairIO] = {}  # by topic of prompts

    def _limit(self, model: str, used_by_others: int) -> int:
        member, settings = self.process.member, self.settings
        members = member.living(MemberKind.GATEWAY)
        workers = (
            worker
            for worker in member.living(MemberKind.WORKER)
            if (capability := worker.registration.capability) and capability.model == model
        )
        return limit(
            workers,
            sum(not gateway.registration.url for gateway in members),
            share=settings.share,
            in_flight_max=max(0, settings.in_flight_max - used_by_others),
        )

    async def prepare(self) -> None:
        """Create the topics of all pairs, and make their parsers and builders."""
        pairs = pairs_of(self.settings, self.log.topic_prefix)
        retention_ms = TOPICS["prompts"].retention_ms
        topics = {topic for pair in pairs for topic in _topics(pair)}
        retentions = dict.fromkeys(sorted(topics), retention_ms)
        self.submitter.partitions = await create_extra_topics(self.log, retentions)
        schemas = WriterSchemas(self.log.schema_registry, self.log.request_timeout_ms)
        written = {*topics, *(pair.prompts + DEAD_LETTER_SUFFIX for pair in pairs)}

        async def ask() -> dict[str, int]:
            return await bytes_max_of(self.log, written)

        limits = TopicLimits(ask, await ask())
        calls = self.process.calls
        default = calls.models.default.card.name
        priority_max = calls.settings.priority_max
        self.pair_ios = {
            pair.prompts: PairIO(
                pair,
                PromptParser(pair, default, self.codec, schemas, priority_max=priority_max),
                AnswerBuilder(
                    pair,
                    self.codec,
                    limits,
                    names_reasoning_content=calls.settings.reasoning_content,
                ),
                limits,
            )
            for pair in pairs
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Serve the partitions that Faust assigns, until `stop` or a fault of the log."""
        try:
            await self._run(stop)
        except TRANSIENT_ERRORS as error:
            FAULTS.note_failing(_SUBJECT, f"{type(error).__name__}: {error}")
            raise

    async def _run(self, stop: asyncio.Event) -> None:
        if not self.pair_ios:
            await self.prepare()
        epoch, group = await self._wait_for_epoch(), Group()
        partitions = BridgePartitions(
            group,
            lambda place: PartitionProcessor(shared, place, self.pair_ios[place[0]]),
            self.submitter.wait_until_sent,
        )
        shared = ProcessorContext(
            log=self.log,
            codec=self.codec,
            bridge_id=self.bridge_id,
            group_id=group_id(self.log),
            submitter=self.submitter,
            slots=self.slots,
            may_ask=partitions.may_ask,
            fail=group.fail,
            epoch=epoch,
        )
        app = make_app(self.log, self.bridge_id, sorted(self.pair_ios), partitions)
        works: Sequence[Any] = (
            run_app(app),
            group.wait_for_failure(),
            self._watch_membership(epoch, partitions),
            partitions.watch(self.log, _STALL_MS),
            stop.wait(),
        )
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done_tasks:
                task.result()
        finally:
            await self._wind_up(partitions, app, tasks)

    async def _wait_for_epoch(self) -> int:
        """Wait until the fleet is joined; return its epoch."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _JOIN_S
        while loop.time() < until_s:
            if self.process.member.epoch:
                return self.process.member.epoch
            await asyncio.sleep(_LOOK_S)
        raise BrokerUnavailable("the fleet is not joined yet")

    async def _watch_membership(self, epoch: int, partitions: BridgePartitions) -> None:
        """Hand out free slots; raise LeaseError when the epoch in the fleet has changed."""
        while self.process.member.epoch == epoch:
            self.slots.hand_out()
            if partitions.is_ready:
                FAULTS.note_working(_SUBJECT)
            await asyncio.sleep(_LOOK_S)
        raise LeaseError(f"{self.bridge_id}: was away from the fleet; begins anew")

    async def _wind_up(
        self, partitions: BridgePartitions, app: Any, tasks: Sequence[asyncio.Task[Any]]
    ) -> None:
        """Stop within a bounded time; an unfinished stop is safe, as all state is in the log."""

        async def finish() -> None:
            await partitions.stop()
            await app.stop()

        if not await run_within(_WIND_UP_S, finish()):
            logger.warning("%s: gave up winding down", self.bridge_id)
        await cancel_and_wait(*tasks)


def _topics(pair: TopicPair) -> list[str]:
    return [topic for topic in (pair.prompts, pair.answers, pair.parts) if topic]


async def run_bridge(
    log: LogSettings,
    settings: BridgeSettings,
    gateway: GatewaySettings,
    models: Sequence[ModelSettings],
    *,
    bridge_id: str,
    stop: asyncio.Event,
    codec: Codec,
    embedders: Collection[str] = (),
) -> None:
    """Answer prompts until `stop`, and rejoin after faults of the log; raise permanent errors.

    `gateway` has the limits of requests, as for calls over HTTP.
    """
    served = await load_models(models, gateway.tokenizers_max)
    process = CallProcess.build(
        *(log, codec, gateway, served),
        process_id=bridge_id,
        embedders=embedders,
    )
    objects = ObjectLog.build(log, codec, gateway, process.sender, bridge_id)
    bridge = Bridge(log, settings, process, objects, codec, bridge_id)
    works = [
        process.member.run(objects.read(), process.reporter.write()),
        process.calls.sweep_forever(),
    ]
    if settings.documents:
        works.append(feed_documents(log, settings.documents, codec, bridge_id))
    helpers = [asyncio.create_task(run) for run in works]
    living = asyncio.create_task(run_with_reconnect(bridge_id, lambda: bridge.run(stop), stop))
    try:
        await asyncio.wait([*helpers, living], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(living)
        await cancel_and_wait(*helpers)
        await process.pool.close()
    for task in (living, *helpers):
        if not task.cancelled():
            task.result()
