"""The control loop in the process: collects the signals, moves the scheduler, publishes the moves.

The law is `control.py`'s. Figures of the fleet come from its heartbeats, prefill's wait from this
worker's own searches since the last look.
"""

import asyncio

from schemas.log.clients import LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import ControlMoved
from workers.search.engine import control
from workers.search.engine.control import ControlSettings, Move, Signals
from workers.search.engine.engine import SearchEngine
from workers.search.index.kinds import Kind
from workers.search.service.fleet_figures import FleetFigures, stalled_share


class ControlLoop:
    """`run` looks every interval, until cancelled."""

    def __init__(
        self,
        settings: ControlSettings,
        engine: SearchEngine,
        share: float,
        flush_ms: float,
        figures: FleetFigures,
        membership: Membership,
        producer: LogProducer,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self.share, self.flush_ms = share, flush_ms
        self._figures = figures
        self._membership = membership
        self._producer = producer

    async def run(self) -> None:
        """Move when it is time."""
        loop = asyncio.get_running_loop()
        interval_s = self._settings.control_interval_ms / 1000
        due_s = loop.time()
        while True:
            due_s = max(due_s + interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            move = self.look(wall_ms())
            if not move.is_still:
                record = self._record(move)
                key = record.worker_id
                await (await self._producer.send("retrieval.control", record, key=key, partition=0))

    def signals(self, now_ms: int) -> Signals:
        """What is known at this moment."""
        view = self._membership.view
        interval_ms = self._settings.control_interval_ms
        waits = self._engine.waits_ms(Kind.PREFILL, (0.95,), now_ms, interval_ms)
        return Signals(
            link_bytes_per_s=self._figures.link_bytes_per_s(view, now_ms),
            prefill_wait_ms_p95=waits[0] if waits else None,
            decode_stalled_share=stalled_share(view, now_ms),
        )

    def look(self, now_ms: int) -> Move:
        """One step of the loop, carried out."""
        move = control.move(self._settings, self.signals(now_ms), self.share, self.flush_ms)
        self.share, self.flush_ms = move.share, move.flush_ms
        if not move.is_still:
            self._engine.set_share(move.share, move.flush_ms)
        return move

    def _record(self, move: Move) -> ControlMoved:
        signals = move.signals
        return ControlMoved(
            worker_id=self._membership.member_id,
            at_ms=wall_ms(),
            link_bytes_per_s=signals.link_bytes_per_s,
            prefill_wait_ms_p95=signals.prefill_wait_ms_p95,
            decode_stalled_share=signals.decode_stalled_share,
            error=move.error,
            share_before=move.share_before,
            share=move.share,
            flush_ms_before=move.flush_ms_before,
            flush_ms=move.flush_ms,
        )
