"""Changes in Faust and aiokafka for which they have no setting, for one pinned version.

Three things cost milliseconds per record or seconds per rebalance: the consumer's own thread, a
sleep before every record, and a race of four tasks for each message. Three more would be most of a
router's start: a second in which tables may be declared, a search for extensions, and one for the
source of each agent. None of our programs needs any of them. The changes use private names, so
`check` refuses to start on another version. `streams/log/faust/app.py` makes an app with them.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Generator
from importlib.metadata import version
from inspect import isawaitable, iscoroutine
from typing import Any

from aiokafka import TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from schemas.errors import ConfigError
from streams.log.connecting import stop_consumer
from streams.log.faust import library
from streams.log.faust.library import driver, streams
from streams.log.reading.fetching import LONGEST_MS, LOOK_MS, prepare_fetches

FAUST_VERSION = "0.15.3"  # the private names below were checked for this version
FETCH_MS = 100  # shortest wait of a fetch, after partitions have changed
STOP_S = 5.0
RECORDS_PER_TURN = 64
_LISTENING_S = 60.0  # for agents to begin, on a busy machine
_records = itertools.count(1)


def check() -> None:
    """Raise ConfigError unless the installed version is the one that is changed here."""
    if version("faust-streaming") != FAUST_VERSION:
        raise ConfigError(
            f"expected faust-streaming {FAUST_VERSION}, found {version('faust-streaming')}; "
            "streams/log/faust/patches.py changes what it offers no setting for"
        )
    if not hasattr(streams, "sleep"):
        raise ConfigError("faust's streams have no sleep; check streams/log/faust/patches.py")


def install(app: Any, *, leaves_group: bool, reads_committed: bool = False) -> None:
    """Give a new app the changed consumer, and all apps the changed streams."""
    streams.sleep = _turn_now_and_then
    library.venusian.attach = _unlisted
    app.transport = _Transport(app.conf.broker_consumer, app)
    app.transport.leaves_group = leaves_group
    app.transport.reads_committed = reads_committed


class App(library.App):  # type: ignore[misc]  # faust has no types here
    """Faust's app without extensions of other packages, such as Django's."""

    def _init_fixups(self) -> list[Any]:
        return []

    def FlowControlQueue(  # as Faust names it
        self, maxsize: int | None = None, *, clear_on_resume: bool = False
    ) -> "_AgentBuffer":
        return _AgentBuffer(
            maxsize=maxsize, flow_control=self.flow_control, clear_on_resume=clear_on_resume
        )


class _AgentBuffer(library.ThrowableQueue):  # type: ignore[misc]  # faust has no types here
    """The buffer of an agent; accepts fetched records even beyond its size.

    Faust passes on records of all topics one after the other, so a full buffer would block those of
    all other agents. When it is nearly full, Faust stops fetching from its partitions.
    """

    def full(self) -> bool:
        return False


class NoTables(library.TableManager):  # type: ignore[misc]  # faust has no types here
    """Replaces the second in which a program may declare its tables while its agents begin.

    Agents begin in a few turns of the loop. A topic without a listener when the group is joined
    would get its partitions only after 45 s. An agent that ends before it listens fails the start.
    """

    async def on_start(self) -> None:
        app = self.app
        async with asyncio.timeout(_LISTENING_S):
            while len(app.topics) < len(app.agents) and not self.should_stop:  # noqa: ASYNC110
                await asyncio.sleep(0)
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


def _unlisted(agent: Any, category: str, **_: Any) -> None:
    """Skip Venusian's note of an agent, which only programs that search for agents need."""


class _InLoop(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # faust has no types here
    """Faust's consumer with three changes for which it has no setting.

    It runs in the process's own loop, not in a thread of its own: there every batch would cross two
    queues and wait for the interpreter lock, up to five milliseconds, both ways. A fetch waits
    100 ms and not 1500, but longer and longer while no records come
    (`streams/log/reading/fetching.py`): that bounds how long a partition waits for others.
    Partitions are assigned by range, so that one member owns the same partitions of all topics;
    Faust would assign them round-robin over all topics together.
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
                # aiokafka leaves the group only for members without an instance id
                self._consumer._coordinator._group_instance_id = None  # noqa: SLF001  # no setting
            await stop_consumer(self._consumer, STOP_S)

    async def call_thread(self, fun: Any, *args: Any, **options: Any) -> Any:
        result = fun(*args, **options)
        return await result if isawaitable(result) else result

    async def cast_thread(self, fun: Any, *args: Any, **options: Any) -> None:
        await self.call_thread(fun, *args, **options)

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        committed = "read_committed" if transport.reads_committed else "read_uncommitted"
        for name, value in (
            ("_consumer_timeout", LOOK_MS / 1_000),
            ("_partition_assignment_strategy", (RangePartitionAssignor,)),
            ("_isolation_level", committed),
        ):
            if not hasattr(consumer, name):
                raise ConfigError(
                    f"aiokafka's consumer has no {name}; check streams/log/faust/patches.py"
                )
            setattr(consumer, name, value)
        prepare_fetches(consumer, FETCH_MS, LONGEST_MS)
        return consumer


async def _turn_now_and_then(delay_s: float) -> None:
    """Sleep only sometimes, in place of Faust's `sleep(0)` before every record of a stream.

    A busy loop's turn lasts milliseconds, so a burst of records would wait for one turn each.
    """
    if not next(_records) % RECORDS_PER_TURN:
        await asyncio.sleep(delay_s)


class _ResumedCoroutine:
    """The rest of a coroutine after its first step, which waits for `first`."""

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
        """Pass on a message without Faust's race of four new tasks against a rebalance.

        Nearly always the message goes straight into the agent's buffer. So take that step first,
        without a task, and race only if the buffer is full.
        """
        if len(waits) != 2 or not (iscoroutine(waits[0]) and iscoroutine(waits[1])):
            return await super().wait_first(*waits, **options)
        handing, suspended = waits
        try:
            waited = handing.send(None)
        except StopIteration:
            suspended.close()
            return None
        return await super().wait_first(_ResumedCoroutine(handing, waited), suspended, **options)

    async def commit_note(self, tp: TopicPartition, offset: int, note: str) -> None:
        """Commit an offset with metadata, which Faust's own commits lack. Raise KafkaError."""
        await self._thread._ensure_consumer().commit({tp: (offset, note)})  # noqa: SLF001  # no way

    def _new_consumer_thread(self) -> _InLoop:
        return _InLoop(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):  # type: ignore[misc]  # faust has no types here
    Consumer = _Consumer
    leaves_group = False
    reads_committed = False
