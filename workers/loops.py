"""The loops of a running worker: read work, take engine steps, send frames, watch deadlines.

Each loop is one task of `workers/serving.py` and runs until cancelled; whatever it raises ends the
life. The rules are in `workers/llm/held.py`. While the lease is in doubt nothing is written and no
work begins. No loop awaits a token frame's acknowledgement, but a partition's next frame leaves
only after it; an outcome is written when the frame that ends its stream is in the log, and a frame
that cannot be written ends the life, so that no answer gets a hole.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, EngineDead, RecordError
from schemas.log.clients import Ack, AssignedReader, LogProducer, bury
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import AssignRoles, CancelWork, Work
from schemas.rules.sizes import check_size
from workers.config import WorkerSettings
from workers.llm.engine import Engine, Output
from workers.llm.frames import Frames, HeldReport
from workers.llm.held import HeldRequests
from workers.outbox import Outbox

_INTERVAL_STREAMS = 64  # so many share frames at the shortest interval


class Loops:
    """What the tasks of a worker share while it serves."""

    def __init__(
        self,
        *,
        codec: Codec,
        durable: LogProducer,
        tokens: LogProducer,
        membership: Membership,
        engine: Engine,
        held: HeldRequests,
        frames: Frames,
        outbox: Outbox,
        settings: WorkerSettings,
        assign: Callable[[AssignRoles], None],
    ) -> None:
        self._codec = codec
        self._durable = durable
        self._tokens = tokens
        self._membership = membership
        self._engine = engine
        self._held = held
        self._frames = frames
        self._outbox = outbox
        self._settings = settings
        self._assign = assign
        self._sending = asyncio.Lock()  # frames leave in the order in which they were filled
        self._armed_ms: int | None = None
        self._rearm = asyncio.Event()
        self._next_s = 0.0  # when the next frame of many streams may leave
        self._alarm: asyncio.TimerHandle | None = None  # the timer for that
        self._busy: set[int] = set()  # gateway partitions whose last frame is not acknowledged
        self._acknowledged = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self, reader: AssignedReader) -> None:
        """Take work from one leased partition."""
        try:
            await self._read(reader)
        except KafkaError as error:
            raise BrokerUnavailable(f"{reader.topic}: cannot be read: {error}") from error

    async def _read(self, reader: AssignedReader) -> None:
        while True:
            await self._outbox.room()
            records = await reader.batch(max_records=self._settings.read_records_max)
            await self._membership.stands()
            for record in records:
                await self._take(record)
            self._watch_deadlines()
            await self.flush()
            await asyncio.sleep(0)  # a backlog must not starve the decode loop

    async def _take(self, record: ConsumerRecord) -> None:
        try:
            order = self._codec.decode(record.value)
            check_size(order, len(record.value))
            if isinstance(order, Work):
                self._held.take(order, record.headers, wall_ms())
            elif isinstance(order, CancelWork):
                self._held.cancel(order, wall_ms())
            elif isinstance(order, AssignRoles):
                self._assign(order)
            else:
                raise RecordError(
                    f"expected Work, CancelWork or AssignRoles, found {type(order).__name__}"
                )
        except RecordError as error:
            await bury(self._durable, record, error)

    async def step(self) -> None:
        """Take the engine's outputs step by step, and send their tokens at once."""
        while True:
            outputs = await self._outputs()
            self._held.step(outputs, wall_ms())
            await self.flush()

    async def _outputs(self) -> list[Output]:
        try:
            return await self._engine.outputs()
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(f"the engine failed: {type(error).__name__}: {error}") from error

    async def flush(self, *, at_once: bool = False) -> None:
        """Send what the frames hold: all of it, or what is urgent while the timer runs."""
        if not self._frames.pending(self._busy):
            return
        urgent_only = not at_once and self._may_wait()
        if urgent_only and not self._frames.urgent:
            return
        async with self._sending:
            await self._membership.stands()
            for batch in self._frames.take(wall_ms(), self._busy, urgent_only=urgent_only):
                self._busy.add(batch.partition)
                # An end must not vanish with a broker, whatever the settings know of others.
                producer = self._durable if batch.frame.ends else self._tokens
                ack = await producer.send(
                    "tokens", batch.frame, key=str(batch.partition), partition=batch.partition
                )
                ack.add_done_callback(
                    partial(self._frame_acknowledged, batch.partition, batch.reports)
                )

    def _may_wait(self) -> bool:
        """Whether later tokens of many streams are pending, too soon after their last frame.

        The more streams, the longer they wait: their cost per token falls with every one that joins
        a frame, and what beginnings and ends then find free is their latency.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        now_s = loop.time()
        wait = now_s < self._next_s and self._frames.streams > settings.frame_at_once_max
        if not wait:
            longer = max(1.0, len(self._held) / _INTERVAL_STREAMS)
            most_ms = max(settings.frame_interval_ms, settings.frame_interval_ms_max)
            self._next_s = now_s + min(settings.frame_interval_ms * longer, most_ms) / 1000
        elif self._alarm is None:
            self._alarm = loop.call_at(self._next_s, self._ring)
        return wait

    def _ring(self) -> None:
        self._alarm = None  # timers may go off a little early: whoever looks arms the next one
        self._acknowledged.set()

    def _frame_acknowledged(self, partition: int, reports: Sequence[HeldReport], ack: Ack) -> None:
        self._busy.discard(partition)
        self._acknowledged.set()
        if ack.cancelled() or self._broken.done():
            return
        error = ack.exception()
        if error is not None:
            self._broken.set_exception(BrokerUnavailable(f"a token frame was not written: {error}"))
            return
        for record, headers in reports:
            self._outbox.add(record, headers)

    async def send_waiting(self) -> None:
        """After each acknowledgement or interval, send what has come together meanwhile."""
        while True:
            await self._acknowledged.wait()
            self._acknowledged.clear()
            await self.flush()

    async def watch(self) -> None:
        """Raise what went wrong in a callback."""
        await self._broken

    async def settled(self) -> None:
        """Wait until all frames, phases and outcomes are in the log."""
        await self.flush(at_once=True)
        while self._busy or self._frames.pending():
            await self._acknowledged.wait()
            self._acknowledged.clear()
            await self.flush(at_once=True)
        await self._outbox.flushed()

    def _watch_deadlines(self) -> None:
        due_ms = self._held.next_deadline_ms
        if due_ms is not None and (self._armed_ms is None or due_ms < self._armed_ms):
            self._rearm.set()

    async def expire(self) -> None:
        """End requests at their deadlines."""
        while True:
            self._rearm.clear()
            self._armed_ms = due_ms = self._held.next_deadline_ms
            left_s = None if due_ms is None else max(0, due_ms - wall_ms()) / 1000
            try:
                async with asyncio.timeout(left_s):
                    await self._rearm.wait()
            except TimeoutError:
                self._held.expire(wall_ms())
                await self.flush()
