"""Sends phases and outcomes durably, off the decode loop, and never loses one silently.

The rules are in `workers/llm/reports.py`. A record that cannot be sent ends the life. Nothing is
sent while the worker's lease is in doubt.

Somebody waits for a phase: it leaves at once, with all that stands before it. No client does for an
outcome, whose stream has its end already, unless it offers KV: a next turn may be here soon that
can use it. So outcomes leave together, a moment later: each record for itself would cost its
writer, the log and the routers a request more. Where all workers are full, the next request that is
queued waits for that moment too, 20 ms at most: the router gives a worker's place to another once
it reads the outcome.
"""

import asyncio
from collections.abc import Awaitable, Callable

from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.log.clients import Ack, Headers, LogProducer
from schemas.records import Outcome, Phase, Retrieved
from workers.llm.reports import PendingReport, Reports

GATHER_S = 0.02  # so long outcomes wait for others


class ReportOutbox:
    """Phases and outcomes on their way. `add` never blocks; `run` sends until cancelled."""

    def __init__(
        self,
        producer: LogProducer,
        wait_until_valid: Callable[[], Awaitable[None]],
        *,
        pending_max: int,
        tries_max: int,
    ) -> None:
        self.on_written: Callable[[Retrieved], None] = lambda record: None
        self._producer = producer
        self._wait_until_valid = wait_until_valid
        self._reports = Reports(pending_max=pending_max, tries_max=tries_max)
        self._changed = asyncio.Event()
        self._has_space = asyncio.Event()
        self._flushed = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._update()

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, record: Phase | Outcome | Retrieved, headers: Headers = ()) -> None:
        """Send a record, an outcome with those that follow soon; `on_written` is told when a
        `Retrieved` is there."""
        self._reports.add(record, headers)
        if not isinstance(record, Outcome) or record.kv is not None:
            self._changed.set()
        elif self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_S, self._end_gathering)
        self._update()

    def _end_gathering(self) -> None:
        self._gathering = None
        self._changed.set()

    def _update(self) -> None:
        for event, is_true in (
            (self._has_space, self._reports.has_space),
            (self._flushed, not len(self._reports)),
        ):
            if is_true:
                event.set()
            else:
                event.clear()

    async def wait_for_space(self) -> None:
        """Wait until fewer than the most records are pending; who makes more asks first."""
        await self._has_space.wait()

    async def wait_flushed(self) -> None:
        """Wait until everything was acknowledged."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Send, while the lease stands; raises BrokerUnavailable after all tries."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._reports.is_due:
                self._check()
                await self._wait_until_valid()
                await self._send(self._reports.next())
            self._check()

    def _check(self) -> None:
        if self._reports.fatal_error is not None:
            raise self._reports.fatal_error

    async def _send(self, report: PendingReport) -> None:
        record, (topic, key) = report.record, report.address
        try:
            ack = await self._producer.send(
                topic,
                record,
                key=key,
                partition=self._producer.session_partition(record.session_id),
                headers=report.headers,
            )
        except RecordTooLarge as error:
            self._reports.shrink(report, error)
        except BrokerUnavailable as error:
            self._failed(report, error)
        else:
            ack.add_done_callback(lambda future: self._acknowledged(report, future))

    def _acknowledged(self, report: PendingReport, ack: Ack) -> None:
        if ack.cancelled():
            return  # the producer was closed
        error = ack.exception()
        if error is not None:
            self._failed(report, error)
            return
        self._reports.mark_acknowledged(report)
        self._update()
        if isinstance(report.record, Retrieved):
            self.on_written(report.record)

    def _failed(self, report: PendingReport, error: BaseException) -> None:
        pause_ms = self._reports.record_failure(report, error)
        if pause_ms is None:
            self._changed.set()
            return
        asyncio.get_running_loop().call_later(pause_ms / 1000, self._retry, report)

    def _retry(self, report: PendingReport) -> None:
        self._reports.retry(report)
        self._changed.set()
