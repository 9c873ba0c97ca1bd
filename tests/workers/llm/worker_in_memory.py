"""The requests that a worker holds, with everything around them in memory."""

from typing import Any

from schemas.records import (
    Outcome,
    Phase,
    Retrieved,
    Role,
    StreamEnd,
    TokenFrame,
    Work,
    WorkPhase,
)
from streams.log.clients import Headers
from tests.schemas.examples import TRACEPARENT
from tests.workers.fakes import EPOCH, MODEL, WORKER, FakeEngine, work
from workers.llm.active_requests import ActiveRequests, RequestLimits
from workers.llm.frames import Frames
from workers.llm.parsing.parsers import Parsers
from workers.llm.probing.jobs import ProbingJobs
from workers.llm.stream import WorkerIdentity

NOW_MS = 1_000_000
PREFILL, DECODE = WorkPhase.PREFILL, WorkPhase.DECODE
TRACE: Headers = [("traceparent", TRACEPARENT), ("ce_type", b"x")]


class WorkerInMemory:
    """The `ActiveRequests` of a worker with engine, frames and reports in memory."""

    def __init__(
        self,
        held_max: int = 4,
        seen_max: int = 64,
        *roles: Role,
        at_once: int = 0,
        model_len: int = 0,
        parsers: Parsers | None = None,
    ) -> None:
        self.epochs: dict[str, int] = {}  # of other workers, as the fleet knows them
        self.clocks_ms: dict[str, int] = {}  # likewise, over this one's
        self.engine = FakeEngine()
        self.asks: list[Any] = []
        self.records: list[Retrieved] = []  # what is to be written of searches
        self.probing = ProbingJobs(
            self.engine, self.asks.append, self.records.append, model_len=model_len
        )
        self.frames = Frames(WORKER)
        self.phases: list[Phase] = []
        self.headers: list[Headers] = []
        limits = RequestLimits(
            roles=frozenset(roles or (Role.PREFILL, Role.DECODE)),
            model=MODEL,
            held_max=held_max,
            seen_max=seen_max,
            gateway_partitions=2,
            prefill_running_max=at_once,
            adapters=frozenset({"ada"}),
        )
        identity = WorkerIdentity(worker_id=WORKER, epoch=EPOCH)
        self.requests = ActiveRequests(
            self.probing,
            identity,
            limits,
            self.frames,
            self._report,
            self,
            parsers,
        )

    def epoch_of(self, worker_id: str) -> int:
        return self.epochs.get(worker_id, 0)

    def clock_offset_ms(self, worker_id: str) -> int:
        return self.clocks_ms.get(worker_id, 0)

    def _report(self, phase: Phase, headers: Headers) -> None:
        self.phases.append(phase)
        self.headers.append(headers)

    def take(self, order: Work, now_ms: int = NOW_MS) -> None:
        self.requests.take(order, TRACE, now_ms)

    def work(self, request_id: str = "r1", phase: WorkPhase = DECODE, **changes: Any) -> None:
        self.take(work(request_id, phase, NOW_MS, **changes))

    def step(self, *outputs: Any, now_ms: int = NOW_MS + 10) -> None:
        self.requests.step(self.probing.step(outputs, now_ms), now_ms)

    def frame(self, partition: int = 0) -> TokenFrame:
        (batch,) = self.frames.take(NOW_MS)
        assert batch.partition == partition
        for record, headers in batch.reports:  # the runtime does, once the frame is in the log
            if isinstance(record, Phase):
                self._report(record, headers)
        return batch.frame

    def end(self) -> tuple[StreamEnd, Outcome]:
        (batch,) = self.frames.take(NOW_MS)
        (end,), ((outcome, headers),) = batch.frame.ends, batch.reports
        assert isinstance(outcome, Outcome)
        assert headers == [("traceparent", TRACEPARENT)]
        return end, outcome
