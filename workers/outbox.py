"""Sends phases and outcomes durably, outside of the decode loop, and never loses one silently.

The rules are in `workers/llm/reports.py`. A record that cannot be sent ends the incarnation.
Nothing is sent while the worker's lease is in doubt.

The router waits for a phase, so it leaves at once, with all records before it. No client waits for
an outcome, because its stream has already ended. So outcomes leave together, up to 20 ms later:
sent singly, each would cost its writer, the log and the routers one more request. If all workers
are full, the next queued request waits as well, until the router reads the outcome. An outcome that
offers KV leaves at once, because the session's next turn may use the KV soon.
"""

import asyncio
from collections.abc import Awaitable, Callable

from schemas.errors import BrokerUnavailable, RecordTooLarge
from schemas.records import Outcome, Phase, Retrieved
from streams.log.clients import Ack, Headers, LogProducer
from workers.llm.reports import PendingReport, Reports

GATHER_S = 0.02  # how long an outcome waits for others


class ReportOutbox:
    """A queue of phases and outcomes. `add` never blocks; `run` sends until cancelled."""

    def __init__(
        self,
        producer: LogProducer,
        wait_until_valid: Callable[[], Awaitable[None]],
        *,
        pending_max: int,
        tries_max: int,
        on_written: Callable[[Retrieved], None] = lambda record: None,
    ) -> None:
        """Create an outbox; it calls `on_written` when the record of a search is in the log."""
        self._on_written = on_written
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
        """Queue a record; an outcome without KV waits for others."""
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
        """Wait until fewer than `pending_max` records are pending; call it before new work."""
        await self._has_space.wait()

    async def wait_flushed(self) -> None:
        """Wait until all records are acknowledged."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Send records while the lease is valid; raises BrokerUnavailable after all tries."""
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
            self._on_written(report.record)

    def _failed(self, report: PendingReport, error: BaseException) -> None:
        pause_ms = self._reports.record_failure(report, error)
        if pause_ms is None:
            self._changed.set()
            return
        asyncio.get_running_loop().call_later(pause_ms / 1000, self._retry, report)

    def _retry(self, report: PendingReport) -> None:
        self._reports.retry(report)
        self._changed.set()
