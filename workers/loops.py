"""The loops of a running worker: read work, take engine steps, send frames, watch deadlines.

Each loop is one task of `workers/serving.py` and runs until cancelled; any exception ends the
incarnation. The rules are in `workers/llm/active_requests.py`. While the lease is in doubt, the
worker writes nothing and starts no work. No loop awaits the acknowledgement of a token frame, but a
partition's next frame leaves only after it. An outcome is written when the frame that ends its
stream is in the log. A frame that cannot be written ends the incarnation, so that no answer has a
gap.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, EngineDead, RecordError
from schemas.records import AssignRoles, CancelWork, Retrieved, WarmPrefix, Work
from schemas.rules.sizes import check_size
from streams.log.clients import Ack, AssignedReader, LogProducer, send_dead_letter
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from workers.llm.active_requests import ActiveRequests
from workers.llm.engine import Engine, Output
from workers.llm.frames import FrameReport, Frames
from workers.llm.pacing import INTERVALS, Pacing
from workers.llm.probing.jobs import ProbingJobs
from workers.llm.warm import warm_prefix
from workers.outbox import ReportOutbox
from workers.probes import Prober

_READ_RECORDS_MAX: Final = 64  # of work, so that reading never delays decode for long


class Loops:
    """The loops of one incarnation, and the state that they share."""

    def __init__(
        self,
        *,
        codec: Codec,
        durable: LogProducer,
        tokens: LogProducer,
        membership: Membership,
        engine: Engine,
        probing: ProbingJobs,
        prober: Prober,
        requests: ActiveRequests,
        frames: Frames,
        outbox: ReportOutbox,
        assign: Callable[[AssignRoles], None],
    ) -> None:
        self._codec = codec
        self._durable = durable
        self._tokens = tokens
        self._membership = membership
        self._engine = engine
        self._probing = probing
        self._prober = prober
        self._requests = requests
        self._outbox = outbox
        self._assign = assign
        self._sending = asyncio.Lock()  # frames leave in the order in which `Pacing` returns them
        self._armed_ms: int | None = None
        self._rearm = asyncio.Event()
        self._pacing = Pacing(frames, INTERVALS)
        self._alarm: asyncio.TimerHandle | None = None  # for frames that wait for the interval
        self._acknowledged = asyncio.Event()
        self._replaying = asyncio.Event()
        requests.on_replay = self._replaying.set
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self, reader: AssignedReader) -> None:
        """Read work from one leased partition; raises BrokerUnavailable if that fails."""
        try:
            while True:
                await self._outbox.wait_for_space()
                records = await reader.batch(max_records=_READ_RECORDS_MAX)
                await self._membership.wait_until_valid()
                for record in records:
                    await self._take(record)
                self._watch_deadlines()
                await self.flush()
                await asyncio.sleep(0)  # a backlog must not starve the decode loop
        except KafkaError as error:
            raise BrokerUnavailable(f"{reader.topic}: cannot be read: {error}") from error

    async def _take(self, record: ConsumerRecord) -> None:
        try:
            order = self._codec.decode(record.value)
            check_size(order, len(record.value))
            if isinstance(order, Work):
                if order.probes is not None:
                    self._prober.request_lease()
                self._requests.take(order, record.headers, wall_ms())
            elif isinstance(order, CancelWork):
                self._requests.cancel(order, wall_ms())
            elif isinstance(order, AssignRoles):
                self._assign(order)
            elif isinstance(order, WarmPrefix):
                warm_prefix(order, self._engine, self._requests, wall_ms())
            else:
                expected = "Work, CancelWork, AssignRoles or WarmPrefix"
                raise RecordError(f"expected {expected}, found {type(order).__name__}")
        except RecordError as error:
            await send_dead_letter(self._durable, record, error)

    async def step(self) -> None:
        """Process the outputs of each engine step, and send the frames that are due."""
        while True:
            outputs, now_ms = await self._outputs(), wall_ms()
            self._requests.step(self._probing.step(outputs, now_ms), now_ms)
            if len(self._probing):
                self._watch_deadlines()
            await self.flush()

    async def catch_up(self) -> None:
        """Have parsers take the tokens of earlier attempts; other tasks run after each part."""
        while True:
            await self._replaying.wait()
            self._replaying.clear()
            while self._requests.catch_up(wall_ms()):
                await self.flush()
                await asyncio.sleep(0)
            await self.flush()

    def take_result(self, result: Retrieved, seeds: Sequence[str]) -> None:
        """Pass on the result of a search that has ended."""
        now_ms = wall_ms()
        self._emit(self._probing.take_result(result, seeds, now_ms), now_ms)

    def record_written(self, record: Retrieved) -> None:
        """Note that the record of a search is in the log."""
        now_ms = wall_ms()
        self._emit(self._probing.record_written(record, now_ms), now_ms)

    def _emit(self, outputs: Sequence[Output], now_ms: int) -> None:
        if outputs:
            self._requests.step(outputs, now_ms)
            self._acknowledged.set()  # wakes `send_waiting`
        self._watch_deadlines()

    async def _outputs(self) -> list[Output]:
        try:
            return await self._engine.outputs()
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(f"the engine failed: {type(error).__name__}: {error}") from error

    async def flush(self, *, at_once: bool = False) -> None:
        """Send the frames that are due; with `at_once`, none waits for the interval."""
        due = self._pacing.due(self._now_ms(), len(self._requests), at_once=at_once)
        self._arm()
        if due is None:
            return
        async with self._sending:
            await self._membership.wait_until_valid()
            for batch in self._pacing.take(due, wall_ms()):
                # Ends of streams must survive the loss of a broker, so they are written durably.
                producer = self._durable if batch.frame.ends else self._tokens
                ack = await producer.send(
                    "tokens", batch.frame, key=str(batch.partition), partition=batch.partition
                )
                ack.add_done_callback(
                    partial(self._frame_acknowledged, batch.partition, batch.reports)
                )

    def _now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    def _arm(self) -> None:
        """Set a timer for the end of the interval that frames wait for."""
        alarm_ms = self._pacing.alarm_ms
        if self._alarm is None and alarm_ms is not None:
            self._alarm = asyncio.get_running_loop().call_at(alarm_ms / 1000, self._ring)

    def _ring(self) -> None:
        # A timer may fire slightly early; the next `flush` then arms another.
        self._alarm, self._pacing.alarm_ms = None, None
        self._acknowledged.set()

    def _frame_acknowledged(self, partition: int, reports: Sequence[FrameReport], ack: Ack) -> None:
        if ack.cancelled() or self._broken.done():
            return
        error = ack.exception()
        if error is not None:  # the partition's next frame must not leave either: a gap
            self._broken.set_exception(BrokerUnavailable(f"a token frame was not written: {error}"))
            return
        self._pacing.mark_acknowledged(partition)
        self._acknowledged.set()
        for record, headers in reports:
            self._outbox.add(record, headers)

    async def send_waiting(self) -> None:
        """Send the frames that are due after each acknowledgement or interval."""
        while True:
            await self._acknowledged.wait()
            self._acknowledged.clear()
            await self.flush()

    async def watch(self) -> None:
        """Wait for an error of a callback, and raise it."""
        await self._broken

    async def wait_settled(self) -> None:
        """Wait until all frames, phases and outcomes are in the log."""
        await self.flush(at_once=True)
        while not self._pacing.is_settled:
            await self._acknowledged.wait()
            self._acknowledged.clear()
            await self.flush(at_once=True)
        await self._outbox.wait_flushed()

    def _due_ms(self) -> int | None:
        """Return the time of the next deadline or late search; None if there is none."""
        due = (self._requests.next_deadline_ms, self._probing.alarm_ms)
        return min((deadline_ms for deadline_ms in due if deadline_ms is not None), default=None)

    def _watch_deadlines(self) -> None:
        due_ms = self._due_ms()
        if due_ms is not None and (self._armed_ms is None or due_ms < self._armed_ms):
            self._rearm.set()

    async def expire(self) -> None:
        """End requests at their deadlines, and stop waiting for searches that are late."""
        while True:
            self._rearm.clear()
            self._armed_ms = due_ms = self._due_ms()
            left_s = None if due_ms is None else max(0, due_ms - wall_ms()) / 1000
            try:
                async with asyncio.timeout(left_s):
                    await self._rearm.wait()
            except TimeoutError:
                now_ms = wall_ms()
                self._requests.step(self._probing.wake(now_ms), now_ms)
                self._requests.expire(now_ms)
                await self.flush()
