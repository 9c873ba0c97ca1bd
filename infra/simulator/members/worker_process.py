"""One process of a simulated worker: the rules of `workers/` between a simulated engine and log.

What `workers/loops.py` and `workers/outbox.py` await is a call on the virtual clock here. The real
code decides which record is due when: active requests, frames, their pacing and reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.simulator.log.clock import Clock
from infra.simulator.machine.engine import TimedEngine
from infra.simulator.members.searches import Answer
from schemas.errors import RecordTooLarge, WorkerRefused
from schemas.records import CancelWork, Outcome, Phase, Retrieved, TokenFrame, WarmPrefix, Work
from workers.llm.active_requests import ActiveRequests, RequestLimits
from workers.llm.engine import Output
from workers.llm.frames import Frames, OutgoingFrame
from workers.llm.pacing import INTERVALS, Pacing
from workers.llm.probing.answer import ProbeAsk
from workers.llm.probing.jobs import ProbingJobs
from workers.llm.reports import PendingReport, Reports
from workers.llm.stream import Peers, WorkerIdentity
from workers.llm.warm import warm_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The worker's outputs; `frame` and `report` raise RecordTooLarge. A record is acknowledged
    after `ack_ms`."""

    frame: Callable[[int, TokenFrame], None]  # to a gateway's partition
    report: Callable[[Phase | Outcome | Retrieved], None]
    probe: Callable[[ProbeAsk, Answer], None]  # to the retrieval pool
    blocks_changed: Callable[[str], None]  # the prefix cache of a worker changed
    ack_ms: float


class SimProcess:
    """A process that serves until `end`. `make_engine` gets the callback that wakes this
    process."""

    def __init__(
        self,
        identity: WorkerIdentity,
        clock: Clock,
        limits: RequestLimits,
        make_engine: Callable[[Callable[[], None]], TimedEngine],
        peer_view: Peers,
        ports: Ports,
        on_work: Callable[[Work], None] = lambda work: None,
    ) -> None:
        """`on_work` gets each piece of work after it was taken."""
        self.alive = True
        self._on_work = on_work
        self.engine = make_engine(self._wake)
        frames = Frames(identity.worker_id)
        self._pacing = Pacing(frames, INTERVALS)
        self._reports = Reports()
        self.probing = ProbingJobs(
            self.engine,
            lambda ask: ports.probe(ask, self._on_retrieved),
            lambda record: self._reports.add(record, ()),
        )
        self.requests = ActiveRequests(
            self.probing, identity, limits, frames, self._reports.add, peer_view
        )
        self._identity, self._clock, self._ports = identity, clock, ports
        self._at_work = False
        self._expiry_ms: int | None = None  # when deadlines are checked next
        self._interval_ms: float | None = None  # when frames that wait for their interval are sent

    def take(self, work: Work) -> None:
        """Take a piece of work from the log."""
        if self.alive and not self._clock.defers(lambda: self.take(work)):
            self.requests.take(work, (), int(self._clock.now_ms))
            self._go_on()
            self._watch_deadlines()
            self._on_work(work)

    def cancel(self, order: CancelWork) -> None:
        """Take an order to stop a job from the log."""
        if self.alive and not self._clock.defers(lambda: self.cancel(order)):
            self.requests.cancel(order, int(self._clock.now_ms))
            self._go_on()

    def warm(self, order: WarmPrefix) -> None:
        """Take an order to compute a prompt's prefix from the log."""
        is_known = f"warm.{order.request_id}" in self.engine.state.computations
        if self.alive and not is_known and not self._clock.defers(lambda: self.warm(order)):
            warm_prefix(order, self.engine, self.requests, int(self._clock.now_ms))
            self._go_on()

    def drain(self) -> None:
        """Accept no new work, and finish the active requests."""
        self.requests.draining = True

    def leave(self) -> None:
        """Return the active requests and end; another process may follow."""
        error = WorkerRefused(f"worker {self._identity.worker_id} is shutting down").to_wire()
        self.requests.give_back(error, int(self._clock.now_ms))
        self._go_on()
        self.end()

    def end(self) -> None:
        """End the process with all its state, and write nothing."""
        self.alive = False
        self.engine.state.stop()

    def _wake(self) -> None:
        """Handle the engine's news, unless the process sleeps."""
        if self.engine.state.is_dead:
            self.alive = False
        if self.alive and not self._at_work and not self._clock.defers(self._wake):
            self._go_on()

    def _go_on(self) -> None:
        """Handle the engine's outputs, and send the records that are due."""
        if not self.alive:  # its last input may have ended its engine
            return
        engine, reports = self.engine, self._reports
        self._at_work = True
        while engine.state.outputs:
            now_ms = int(self._clock.now_ms)
            self.requests.step(self.probing.step(engine.drain(), now_ms), now_ms)
        self._at_work = False
        if not self._pacing.is_settled:
            self._send_frames()
        while reports.is_due:
            self._send_report(reports.next())
        if engine.state.cache.has_changed:
            self._ports.blocks_changed(self._identity.worker_id)
        if len(self.probing):
            self._watch_deadlines()

    def _on_retrieved(self, retrieved: Retrieved, seeds: Sequence[str]) -> None:
        """Take the result of a search during an answer."""
        if not self._clock.defers(lambda: self._on_retrieved(retrieved, seeds)):
            self._say(lambda now_ms: self.probing.take_result(retrieved, seeds, now_ms))

    def _on_written(self, record: Retrieved) -> None:
        """Note that the result of a search is in the log."""
        self._say(lambda now_ms: self.probing.record_written(record, now_ms))

    def _say(self, outputs: Callable[[int], Sequence[Output]]) -> None:
        if self.alive:
            now_ms = int(self._clock.now_ms)
            self.requests.step(outputs(now_ms), now_ms)
            self._go_on()

    def _send_frames(self) -> None:
        pacing, now_ms = self._pacing, self._clock.now_ms
        while (due := pacing.due(now_ms, len(self.requests))) is not None:
            batches = pacing.take(due, int(now_ms))
            for batch in batches:
                self._send_frame(batch)
            if not batches:  # urgent frames wait for an acknowledgement
                break
        if pacing.alarm_ms is not None and self._interval_ms is None:
            self._interval_ms = pacing.alarm_ms
            self._clock.at(pacing.alarm_ms, self._interval_over)

    def _send_frame(self, batch: OutgoingFrame) -> None:
        self._ports.frame(batch.partition, batch.frame)
        if self._ports.ack_ms:
            self._clock.after(self._ports.ack_ms, lambda: self._frame_acknowledged(batch))
        else:
            self._on_frame_written(batch)

    def _frame_acknowledged(self, batch: OutgoingFrame) -> None:
        if self.alive:
            self._on_frame_written(batch)
            self._go_on()

    def _on_frame_written(self, batch: OutgoingFrame) -> None:
        self._pacing.mark_acknowledged(batch.partition)
        for record, headers in batch.reports:
            self._reports.add(record, headers)

    def _interval_over(self) -> None:
        self._interval_ms = self._pacing.alarm_ms = None
        if self.alive:
            self._go_on()

    def _send_report(self, report: PendingReport) -> None:
        try:
            self._ports.report(report.record)
        except RecordTooLarge as error:
            self._reports.shrink(report, error)
        else:
            self._reports.mark_acknowledged(report)  # nothing here depends on pending reports
            record = report.record
            if isinstance(record, Retrieved):
                self._clock.after(self._ports.ack_ms, lambda: self._on_written(record))

    def _watch_deadlines(self) -> None:
        due = (self.requests.next_deadline_ms, self.probing.alarm_ms)
        due_ms = min((alarm_ms for alarm_ms in due if alarm_ms is not None), default=None)
        if due_ms is not None and (self._expiry_ms is None or due_ms < self._expiry_ms):
            self._expiry_ms = due_ms
            self._clock.at(due_ms, lambda: self._expire(due_ms))

    def _expire(self, due_ms: int) -> None:
        if self.alive and self._expiry_ms == due_ms:
            self._expiry_ms = None
            now_ms = int(self._clock.now_ms)
            self.requests.step(self.probing.wake(now_ms), now_ms)
            self.requests.expire(now_ms)
            self._go_on()
            self._watch_deadlines()
