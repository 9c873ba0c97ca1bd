"""The log as the gateway uses it; implements `Backend` of `state.py`.

`LogBackend` joins the fleet, leases a partition of `tokens`, reads it into the hub, and sends
requests and cancellations. It survives a loss of the broker: meanwhile it refuses calls, and
afterwards it joins again with a new epoch.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from schemas.codec import Codec
from schemas.errors import (
    BrokerUnavailable,
    NameTaken,
    NotReady,
    RecordError,
    RecordTooLarge,
    TopicError,
)
from schemas.fleet import FleetView, Member
from schemas.records import (
    Cancellation,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Request,
    Resumption,
    Role,
    TokenFrame,
)
from schemas.settings import LogSettings
from streams.calls.config import GatewaySettings
from streams.calls.ids import ConversationTurn
from streams.calls.log.answers import ProgressReporter
from streams.calls.log.frames import FRAMES_MAX, decode_frame, frame_reader, frames_from
from streams.calls.log.turns import TurnTopic
from streams.calls.metrics import Metrics
from streams.calls.stream.hub import Hub
from streams.log.admin import check_retention, needs_of_requests
from streams.log.clients import AssignedReader, Headers, LogProducer, send_dead_letter
from streams.log.clock import wall_ms
from streams.log.connecting import is_unreachable
from streams.log.membership import Membership
from streams.log.reading.faults import FAULTS
from streams.log.retry import TRANSIENT_ERRORS, Backoff
from streams.openai.objects.log import ObjectLog
from streams.openai.objects.quota import Quota
from streams.openai.responses.log import ResponseTopic

logger = logging.getLogger(__name__)
RECONNECT_S = 1.0
_TROUBLE = (*TRANSIENT_ERRORS, TopicError)
ToRouter = Request | Cancellation | Resumption


class LogBackend:
    """The connection to the Kafka log. `run` maintains it; the other methods answer from its state.

    Without a `url`, as in a bridge, it serves no callers over HTTP: it does not read the topics
    that only they need, and is never the first of the gateways.
    """

    def __init__(
        self,
        log: LogSettings,
        settings: GatewaySettings,
        *,
        gateway_id: str,
        started_ms: int,
        url: str,
        models: frozenset[str],
        hub: Hub,
        metrics: Metrics,
        codec: Codec,
    ) -> None:
        self._log = log
        self._settings = settings
        self._gateway_id = gateway_id
        self._started_ms = started_ms  # of the process, in all epochs; routers use it as its id
        self._epoch = 0
        self._url = url
        self._models = models
        self._hub = hub
        self._metrics = metrics
        metrics.fleet = lambda: None if self._membership is None else self._membership.view
        self._codec = codec
        self.turns = TurnTopic(
            log,
            codec,
            gateway_id=gateway_id,
            back_ms=settings.session_idle_ms,
            producer=lambda: self._producer,
            bury=self._bury,
        )
        self.responses = ResponseTopic(
            log,
            codec,
            gateway_id=gateway_id,
            accept_ms=settings.accept_ms,
            producer=lambda: self._producer,
        )
        self.objects = ObjectLog(
            log,
            codec,
            gateway_id=gateway_id,
            quota=Quota(
                objects_max=settings.objects_max,
                bytes_max=settings.files_bytes_max,
                tenants=settings.tenants,
                tenant_objects_max=settings.tenant_objects_max,
                tenant_bytes_max=settings.tenant_files_bytes_max,
            ),
            wait_ms=settings.accept_ms,
            producer=lambda: self._producer,
            bury=self._bury,
        )
        self._progress_reporter = ProgressReporter(gateway_id, hub, producer=lambda: self._producer)
        self._producer: LogProducer | None = None
        self._membership: Membership | None = None
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._positions: dict[int, int] = {}
        self._trouble = "not connected yet"
        self._failed_s = float("-inf")

    # Called by the endpoints

    def reply_position(self) -> tuple[int, int]:
        position, membership = self.tokens_position(), self._valid_membership()
        if not self._has_ready_worker(membership, Role.DECODE, Role.REPLICA):
            raise NotReady("no worker serves the model at the moment; try again later")
        return position

    def tokens_position(self) -> tuple[int, int]:
        """Return the reply position even if no worker is ready; raises BrokerUnavailable."""
        partition = self._valid_membership().leases["tokens"]
        return partition, self._positions[partition]

    @property
    def tokens_read(self) -> dict[int, int]:
        """Return the next offset of each partition of `tokens` that this process reads."""
        return dict(self._positions)

    def _valid_membership(self) -> Membership:
        membership = self._membership
        recently = asyncio.get_running_loop().time() - self._failed_s < RECONNECT_S
        waits = membership is not None and membership.waits_for_leader()  # calls wait, too
        if membership is None or recently or not (waits or membership.is_valid()):
            raise BrokerUnavailable(f"the log cannot be written: {self._trouble}")
        itself = membership.view.members.get(self._gateway_id)
        if itself is None or not (waits or itself.is_alive(wall_ms())):
            raise BrokerUnavailable("nothing of the log is heard; is the broker away?")
        return membership

    def _living(self, membership: Membership, kind: MemberKind) -> Iterator[Member]:
        """Yield the members that were alive at this gateway's last heartbeat: later ones were not
        read."""
        return membership.view.living(kind, membership.view.members[self._gateway_id].seen_ms)

    def _has_ready_worker(self, membership: Membership, *roles: Role) -> bool:
        return any(
            member.state is MemberState.READY
            and member.registration.capability is not None
            and member.registration.capability.model in self._models
            and not set(roles).isdisjoint(member.registration.roles)
            for member in self._living(membership, MemberKind.WORKER)
        )

    def is_first(self) -> bool:
        """Return whether this gateway does the work that one gateway does for all."""
        membership = self._membership
        if membership is None or not membership.is_valid():
            return False
        living = self._living(membership, MemberKind.GATEWAY)
        names = [member.member_id for member in living if member.registration.url]
        return min(names, default="") == self._gateway_id

    def view(self) -> FleetView:
        """Return the present view of the fleet; empty while this gateway is no member."""
        return FleetView() if self._membership is None else self._membership.view

    @property
    def epoch(self) -> int:
        """Return the epoch of the membership; 0 while there is none."""
        return 0 if self._membership is None else self._epoch

    def living(self, kind: MemberKind) -> list[Member]:
        membership = self._membership
        if membership is None or self._gateway_id not in membership.view.members:
            return []
        return list(self._living(membership, kind))

    def servers(self) -> list[Registration]:
        membership = self._membership
        members = () if membership is None else membership.view.members.values()
        registrations = (
            member.registration for member in members if member.state is not MemberState.GONE
        )
        return [
            registration
            for registration in registrations
            if registration.kind is MemberKind.ROUTER
            or (
                registration.capability is not None
                and registration.capability.model in self._models
            )
        ]

    def publish_turn(self, turn: ConversationTurn) -> None:
        self.turns.publish(turn)

    def problems(self) -> list[str]:
        try:
            membership = self._valid_membership()
        except BrokerUnavailable as error:
            return [error.message]
        problems = []
        if not any(self._living(membership, MemberKind.ROUTER)):
            problems.append("no router is alive")
        if not self._has_ready_worker(membership, Role.DECODE, Role.REPLICA):
            problems.append("no decode worker is ready, nor a replica")
        for partition in self._positions:
            place = f"{self._log.topic_prefix}tokens[{partition}]"
            if why := FAULTS.why_failing(place):
                problems.append(f"{place}: {why}")
        return problems

    @property
    def is_ready(self) -> bool:
        """Return whether calls of all kinds can be answered."""
        return not self.problems() and self.objects.is_read

    @property
    def producer(self) -> LogProducer:
        """Return the producer; raises BrokerUnavailable while there is none."""
        if self._producer is None:
            raise BrokerUnavailable(f"the log cannot be written: {self._trouble}")
        return self._producer

    async def send(self, record: ToRouter, headers: Headers = ()) -> None:
        topic, session_id = "cancellations", record.session_id
        if isinstance(record, Request):  # the other kinds wait for the broker
            self._valid_membership()
            topic = "requests"
        producer = self.producer
        partition = producer.session_partition(session_id)
        try:
            async with asyncio.timeout(self._settings.accept_ms / 1000):
                ack = await producer.send(
                    topic, record, key=session_id, partition=partition, headers=headers
                )
                await ack
        except MessageSizeTooLargeError as error:  # the broker's own limit is lower
            raise RecordTooLarge(f"{topic}: {record.request_id} is too large: {error}") from error
        except (TimeoutError, KafkaError, BrokerUnavailable) as error:
            if is_unreachable(error):
                self._failed_s = asyncio.get_running_loop().time()
                self._trouble = f"a record was not acknowledged ({type(error).__name__})"
            raise BrokerUnavailable(
                f"{topic}: {record.request_id} was not acknowledged within "
                f"{self._settings.accept_ms} ms: {type(error).__name__}: {error}"
            ) from error

    def read_frames(
        self, partition: int, offset: int, *, live: bool = True
    ) -> AsyncGenerator[TokenFrame]:
        client_id = f"{self._gateway_id}-resume"
        return frames_from(self._log, self._codec, partition, offset, client_id, live=live)

    async def run(self) -> None:
        """Join the fleet, and join again after every failure of the log, until cancelled.

        Raises ConfigError if the log's retention is shorter than a request may live, and NameTaken.
        """
        loop, pauses = asyncio.get_running_loop(), Backoff(RECONNECT_S)  # callers wait for the log
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.objects.read())
                tasks.create_task(self._progress_reporter.write())
                if self._url:
                    tasks.create_task(self.turns.read())
                    tasks.create_task(self.responses.follow())
                    tasks.create_task(self.turns.publish_pending())
                while True:
                    began_s = loop.time()
                    try:
                        await self._stay_joined(tasks)
                    except NameTaken:  # routers would take this process's requests for lost
                        raise
                    except _TROUBLE as error:
                        self._trouble = f"{type(error).__name__}: {error}"
                        logger.warning("%s: %s", self._gateway_id, self._trouble)
                    await asyncio.sleep(pauses.after(loop.time() - began_s))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            if self._producer is not None:
                await _log_trouble(self._producer.stop)

    async def _stay_joined(self, tasks: asyncio.TaskGroup) -> None:
        if self._producer is None:
            await check_retention(self._log, needs_of_requests(self._settings.deadline_ms_max))
            producer = LogProducer(self._log, self._codec, durable=True, client_id=self._gateway_id)
            await producer.start()
            self._producer = producer
        membership = Membership(
            self._log,
            self._codec,
            self._producer,
            member_id=self._gateway_id,
            kind=MemberKind.GATEWAY,
            lease_topics=("tokens",),
            url=self._url,
            on_record=lambda record, *_: self._check_name(membership, record),
            former_epoch=self._epoch,
            started_ms=self._started_ms,
        )
        membership.load_source = lambda: Load(running=len(self._hub))
        try:
            await membership.join()
            await self._read_partition(membership.leases["tokens"], tasks)
            membership.set_state(MemberState.READY)
            self._membership, self._epoch = membership, membership.epoch
            self._trouble = "no heartbeat was acknowledged"
            await membership.run()
        finally:
            self._membership = None
            self._epoch = membership.epoch or self._epoch
            await _log_trouble(membership.leave)

    def _check_name(self, membership: Membership, record: Registration | Heartbeat) -> None:
        if isinstance(record, Registration):
            membership.check_name(record)

    async def _read_partition(self, partition: int, tasks: asyncio.TaskGroup) -> None:
        """Start a reader of the partition. Readers of earlier leases stop after their last call."""
        for old, task in list(self._readers.items()):
            if old != partition and not self._hub.waits_on(old):
                task.cancel()
                del self._readers[old], self._positions[old]
        if partition in self._readers:
            return
        reader = frame_reader(self._log, partition, f"{self._gateway_id}-tokens")
        await reader.start("latest")
        self._positions[partition] = (await reader.end_offsets())[partition]
        self._readers[partition] = tasks.create_task(self._apply_frames(partition, reader))

    async def _apply_frames(self, partition: int, reader: AssignedReader) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    records = await reader.batch(max_records=FRAMES_MAX)
                except KafkaError as error:
                    logger.warning("tokens[%d]: %s: %s", partition, type(error).__name__, error)
                    await asyncio.sleep(RECONNECT_S)
                    continue
                now_s = loop.time()
                for record in records:
                    try:
                        self._hub.apply(decode_frame(self._codec, record.value), now_s)
                    except RecordError as error:
                        await self._bury(record, error)
                if records:
                    self._positions[partition] = records[-1].offset + 1
        finally:
            await reader.stop()

    async def _bury(self, record: ConsumerRecord, error: RecordError) -> None:
        self._metrics.undecodable()
        logger.error("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
        producer = self._producer
        if producer is not None:
            await _log_trouble(lambda: send_dead_letter(producer, record, error))

    async def drain(self) -> None:
        """Report to the fleet that this gateway takes no more calls."""
        membership = self._membership
        if membership is not None:
            membership.set_state(MemberState.DRAINING)
            limit_s = self._settings.accept_ms / 1000
            await _log_trouble(lambda: asyncio.wait_for(membership.beat_now(), limit_s))


async def _log_trouble(action: Callable[[], Awaitable[None]]) -> None:
    """Run an action, and only log a failure of the broker."""
    try:
        await action()
    except _TROUBLE as error:
        logger.warning("%s: %s", type(error).__name__, error)
