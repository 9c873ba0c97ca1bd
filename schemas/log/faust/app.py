"""A Faust app as Trivium uses it: its settings, its consumer and its agents.

Faust receives and acknowledges, nothing else: values are raw, no tables, no web server, and every
send goes through the process's own producer. Agents run one at a time per topic and hand each event
to `take` of the process, which never lets an exception out of them except to end the process.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Generator, Sequence
from importlib.metadata import version
from inspect import isawaitable, iscoroutine
from typing import Any, Protocol

import faust
from aiokafka import ConsumerRecord
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from faust._cython import streams as cython_streams
from faust.transport.drivers import aiokafka as driver

from schemas.errors import BrokerUnavailable, ConfigError
from schemas.log.connecting import client_options
from schemas.settings import LogSettings, home, private_folder

FAUST_VERSION = "0.15.3"  # the private attributes below were checked for this one
FETCH_MAX_WAIT_MS = 100
RECORDS_PER_TURN = 64
_records = itertools.count(1)


class Taker(Protocol):
    """What agents hand their events to."""

    async def take(self, topic: str, event: Any) -> None:
        """One record of a topic; the event is acknowledged by its `ack`, in order."""


class _InLoop(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # faust has no types here
    """Faust's consumer with three things changed that it offers no setting for.

    It runs in the process's own loop, not in a thread of its own: every batch would cross two
    queues and wait for the interpreter lock, five milliseconds at worst, both ways. A fetch waits
    100 ms and not 1500, which bounds how long a partition waits after a rebalance. Partitions are
    assigned by range, so that one member owns the same partitions of all topics; Faust would deal
    them round-robin over all topics together.
    """

    wait_for_shutdown = False  # there is no thread to wait for

    def __init__(self, consumer: Any, *, loop: Any, beacon: Any) -> None:
        super().__init__(consumer, loop=loop, thread_loop=loop, beacon=beacon)

    async def start(self) -> None:
        self._thread_started.set()
        await self._default_start()

    async def on_stop(self) -> None:
        if self._consumer is not None:
            if self.transport.leaves_group:
                # aiokafka says goodbye only for members that have no name
                self._consumer._coordinator._group_instance_id = None  # noqa: SLF001  # no setting
            await self._consumer.stop()

    async def call_thread(self, fun: Any, *args: Any, **options: Any) -> Any:
        result = fun(*args, **options)
        return await result if isawaitable(result) else result

    async def cast_thread(self, fun: Any, *args: Any, **options: Any) -> None:
        await self.call_thread(fun, *args, **options)

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        for name, value in (
            ("_fetch_max_wait_ms", FETCH_MAX_WAIT_MS),
            ("_partition_assignment_strategy", (RangePartitionAssignor,)),
        ):
            if not hasattr(consumer, name):
                raise ConfigError(
                    f"aiokafka's consumer has no {name}; check schemas/log/faust/app.py"
                )
            setattr(consumer, name, value)
        return consumer


async def _turn_now_and_then(delay_s: float) -> None:
    """Stands in for the `sleep(0)` that Faust takes before every record of a stream.

    A busy loop's turn lasts milliseconds, so a burst of records would wait for as many of them.
    """
    if not next(_records) % RECORDS_PER_TURN:
        await asyncio.sleep(delay_s)


class _Resumed:
    """What is left of a coroutine after its first step, which waits for `first`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], first: Any) -> None:
        self._coroutine = coroutine
        self._first = first

    def __await__(self) -> Generator[Any, Any, None]:
        waited = self._first
        try:
            while True:
                yield waited
                waited = self._coroutine.send(None)
        except StopIteration:
            return
        finally:
            self._coroutine.close()


class _Consumer(driver.Consumer):  # type: ignore[misc]  # faust has no types here
    async def wait_first(self, *waits: Any, **options: Any) -> Any:
        """Faust hands each message over in a race of four new tasks, against a rebalance.

        Nearly always the message goes straight into the agent's buffer. So take that step first,
        with no task at all, and race only where the buffer is full.
        """
        if len(waits) != 2 or not (iscoroutine(waits[0]) and iscoroutine(waits[1])):
            return await super().wait_first(*waits, **options)
        handing, suspended = waits
        try:
            waited = handing.send(None)
        except StopIteration:
            suspended.close()
            return None
        return await super().wait_first(_Resumed(handing, waited), suspended, **options)

    def _new_consumer_thread(self) -> _InLoop:
        return _InLoop(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):  # type: ignore[misc]  # faust has no types here
    Consumer = _Consumer
    leaves_group = False


def _credentials(log: LogSettings) -> Any:
    options = client_options(log)
    context = options.get("ssl_context")
    if "sasl_mechanism" in options:
        return faust.SASLCredentials(
            mechanism=log.sasl_mechanism,
            username=log.sasl_username,
            password=log.sasl_password,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None


def make_app(
    log: LogSettings, *, group: str, member_id: str, buffer_max: int = 4_096,
    leaves_group: bool = False,
) -> faust.App:  # fmt: skip
    """An app with no agents yet; `add_agents` follows. `buffer_max` records wait for each agent.

    A member that stops keeps its place in the group until its session ends, ten seconds later: if
    it starts again by then, nobody else has to move. With `leaves_group` it says goodbye instead,
    and the others take its partitions at their next heartbeats.
    """
    if version("faust-streaming") != FAUST_VERSION:
        raise ConfigError(
            f"expected faust-streaming {FAUST_VERSION}, found {version('faust-streaming')}; "
            "schemas/log/faust/app.py changes what it offers no setting for"
        )
    if not hasattr(cython_streams, "sleep"):
        raise ConfigError("faust's streams have no sleep; check schemas/log/faust/app.py")
    cython_streams.sleep = _turn_now_and_then
    private_folder(home())
    datadir = home() / "faust"  # Faust makes one though it keeps nothing there
    private_folder(datadir)
    app = faust.App(
        group,
        broker=[f"kafka://{address}" for address in log.bootstrap.split(",")],
        broker_credentials=_credentials(log),
        broker_client_id=member_id,
        value_serializer="raw",
        key_serializer="raw",
        store="memory://",
        web_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        processing_guarantee="at_least_once",
        producer_linger=0,
        producer_acks=-1,
        producer_request_timeout=10,
        broker_commit_interval=0.5,
        broker_commit_every=10_000,
        broker_max_poll_records=2_000,
        broker_session_timeout=10,
        broker_heartbeat_interval=2,
        broker_rebalance_timeout=15,
        broker_request_timeout=30,
        stream_buffer_maxsize=buffer_max,
        stream_wait_empty=False,
        table_standby_replicas=0,
        consumer_group_instance_id=member_id,
        consumer_metadata_max_age_ms=30_000,
        consumer_auto_offset_reset="earliest",
        worker_redirect_stdouts=False,
        datadir=datadir,
    )
    app.transport = _Transport(app.conf.broker_consumer, app)
    app.transport.leaves_group = leaves_group
    return app


def add_agents(
    app: faust.App, prefix: str, name: str, topics: Sequence[str], taker: Taker
) -> list[Any]:
    """One agent per topic; each hands its events to `taker.take`."""

    def agent_of(topic: str) -> Any:
        async def agent(stream: Any) -> None:
            async for event in stream.noack().events():
                await taker.take(topic, event)

        source = app.topic(prefix + topic, key_type=bytes, value_type=bytes, value_serializer="raw")
        return app.agent(source, name=f"{name}.{topic}", concurrency=1)(agent)

    return [agent_of(topic) for topic in topics]


async def run_app(app: faust.App) -> None:
    """Faust's life; raises BrokerUnavailable when it ends.

    Nothing leaves our agents, so what it crashes with comes from its consumer.
    """
    await app.start()
    app.sensors.remove(app.monitor)  # it costs much per record, and nobody reads it
    await app.wait_until_stopped()
    reason = app.crash_reason
    raise BrokerUnavailable(f"the consumer ended: {type(reason).__name__}: {reason}") from reason


def consumer_record(message: Any) -> ConsumerRecord:
    """Faust's message as other readers have it; the value is still raw."""
    headers = message.headers or ()
    if isinstance(headers, dict):
        headers = headers.items()
    return ConsumerRecord(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        timestamp=int((message.timestamp or 0) * 1000),
        timestamp_type=message.timestamp_type,
        key=message.key,
        value=message.value,
        checksum=None,
        serialized_key_size=-1,
        serialized_value_size=-1,
        headers=tuple(headers),
    )
