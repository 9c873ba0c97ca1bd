"""The decision benchmark: measures how long the router takes to place a request in a large fleet.

`make bench-decisions`, or `trivium bench decisions --quick`. Calls the real `Router.apply` with
records as the log has them: heartbeats of workers, sessions, KV events, and requests of known and
new sessions, with a constant number of requests in flight. Times each event separately. Decisions
are the events that place a request or hand it over. Writes build/bench/decisions.json.
"""

import gc
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.decisions.large_fleet import (
    ROUTER,
    FleetSize,
    FleetTraffic,
    completed_outcome,
    prefill_phase,
)
from infra.bench.results import at_most, cell, percentiles, table
from infra.processes import garbage
from schemas.records import DecisionKind, Work, WorkPhase
from streams.config import POLICIES, RouterSettings
from streams.core.effects import Decide, Dispatch, Effect
from streams.core.events import (
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    SessionLoaded,
    Tick,
)
from streams.core.router import Router

TARGET_MS = 0.3  # one hop over the log takes 2.7 ms
START_MS, STEP_MS, BEAT_MS, TICK_MS = 1_000_000, 2, 500, 50
_PREFILL_SHARE = 0.03  # of the requests in flight
_DECISIONS = (DecisionKind.PLACE, DecisionKind.HANDOFF)
_PERCENTS = (50.0, 99.0, 99.9)
_COLUMNS = ("wall_ms.count", "wall_ms.p50", "wall_ms.p99", "wall_ms.p99.9", "busy_ms.p50",
            "busy_ms.p99", "busy_ms.p99.9")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOptions(FleetSize):
    """Sets the policies to measure and the load."""

    policies: tuple[str, ...] = option(
        ("learned",), choices=[policy for policy in POLICIES if policy != "table"]
    )
    seed: int = option(1)


class FleetRun:
    """One router under the load. `times_ms` has the wall time of each event, by kind. `busy_ms` has
    the thread's CPU time for it, which other processes on the machine do not affect."""

    def __init__(self, size: FleetSize, policy: str, seed: int) -> None:
        self.size = size
        self.traffic = FleetTraffic(size, seed, START_MS)
        self.router = Router(ROUTER, RouterSettings(policy=policy))
        self.now_ms = START_MS
        self.times_ms: dict[str, list[float]] = {}
        self.busy_ms: dict[str, list[float]] = {}
        self.memory_bytes: dict[str, int] = {}
        self.decisions: dict[str, int] = {}
        self._offset = 0
        self._prefilling: deque[Work] = deque()
        self._decoding: deque[Work] = deque()

    def set_up(self) -> None:
        """Apply the records of the fleet, the sessions and the caches, and measure memory."""
        traffic = self.traffic
        for registration in traffic.registrations():
            self._apply("fleet", FleetRecordArrived(registration, self._next()))
        for beat in traffic.heartbeats(1, self.now_ms):
            self._apply("fleet", FleetRecordArrived(beat, self._next()))
        self._apply("takeover", PartitionTaken(0))
        loaded = (SessionLoaded(session, 0) for session in traffic.sessions())
        self.memory_bytes["sessions"] = self._growth_bytes("takeover", loaded, PartitionReady(0))
        events = (KvEventsArrived(record, self._next()) for record in traffic.kv_events())
        self.memory_bytes["prefix_index"] = self._growth_bytes("kv_events", events, Tick())

    def _next(self) -> int:
        self._offset += 1
        return self._offset

    def _growth_bytes(self, kind: str, events: Iterable[Event], last: Event) -> int:
        """Apply the events and return the growth of the process's memory in bytes."""
        before = _resident_bytes()
        for event in events:
            self._apply(kind, event)
        self._apply(kind, last)
        gc.collect()
        return _resident_bytes() - before

    def play(self) -> None:
        """Apply all requests, with phases and outcomes of earlier ones in between."""
        for number in range(self.size.requests):
            self.now_ms += STEP_MS
            self._arrive(RequestArrived(self.traffic.request(number, self.now_ms), 0))
            if len(self._prefilling) > self.size.concurrent_requests * _PREFILL_SHARE:
                self._arrive(
                    PhaseArrived(prefill_phase(self._prefilling.popleft(), self.now_ms), 0)
                )
            if len(self._decoding) > self.size.concurrent_requests * (1 - _PREFILL_SHARE):
                outcome = completed_outcome(self._decoding.popleft(), self.now_ms)
                self._arrive(OutcomeArrived(outcome, 0))
            if self.now_ms % BEAT_MS == 0:
                for beat in self.traffic.heartbeats(self.now_ms, self.now_ms):
                    self._arrive(FleetRecordArrived(beat, self._next()))
            if self.now_ms % TICK_MS == 0:
                self._arrive(Tick())

    def _arrive(self, event: Event) -> None:
        for effect in self._apply(type(event).__name__, event):
            if isinstance(effect, Dispatch) and isinstance(effect.record, Work):
                prefill = effect.record.phase is WorkPhase.PREFILL
                (self._prefilling if prefill else self._decoding).append(effect.record)

    def _apply(self, kind: str, event: Event) -> list[Effect]:
        started_ns, busy_ns = time.perf_counter_ns(), time.thread_time_ns()
        effects = self.router.apply(event, self.now_ms)
        busy_ms = (time.thread_time_ns() - busy_ns) / 1e6
        took_ms = (time.perf_counter_ns() - started_ns) / 1e6
        self._note(kind, took_ms, busy_ms)
        decided = [e.decision for e in effects if isinstance(e, Decide)]
        if len(decided) == 1 and decided[0].kind in _DECISIONS:
            self._note(decided[0].kind.value, took_ms, busy_ms)
            name = f"{decided[0].mode.value} {decided[0].reason.value}"
            self.decisions[name] = self.decisions.get(name, 0) + 1
        return effects

    def _note(self, kind: str, took_ms: float, busy_ms: float) -> None:
        self.times_ms.setdefault(kind, []).append(took_ms)
        self.busy_ms.setdefault(kind, []).append(busy_ms)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def figures_of(run: FleetRun) -> dict[str, Any]:
    """Return percentiles in ms by kind of event, memory in MiB, and counts of decisions."""
    return {
        "ms": {kind: _row(times) for kind, times in run.times_ms.items()},
        "busy_ms": {kind: _row(times) for kind, times in run.busy_ms.items()},
        "memory_mib": {
            name: growth_bytes / 2**20 for name, growth_bytes in run.memory_bytes.items()
        },
        "blocks": len(run.router.placer.prefixes),
        "sessions": len(run.router.tables.sessions),
        "decisions": dict(sorted(run.decisions.items(), key=lambda item: -item[1])),
    }


def _row(times: Sequence[float]) -> dict[str, Any]:
    return {"count": len(times), **percentiles(times, _PERCENTS)}


def measure(policy: str, size: FleetSize, seed: int) -> dict[str, Any]:
    """Measure one policy in a new process, since memory that an earlier run has freed would hide
    the growth of this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(_measure, policy, size, seed).result()


def _measure(policy: str, size: FleetSize, seed: int) -> dict[str, Any]:
    run = FleetRun(size, policy, seed)
    run.set_up()
    with garbage.deferred_gc():  # as a router process does
        run.play()
    return figures_of(run)


def measure_all(options: DecisionOptions, console: Console) -> BenchmarkResult:
    """Measure each policy and collect figures and bars."""
    figures, bars, tables = {}, [], []
    for policy in options.policies:
        load = f"{options.workers} workers, {options.requests} requests"
        console.print(f"{load}, policy {policy} ...")
        row = figures[policy] = measure(policy, options, options.seed)
        for kind in (kind.value for kind in _DECISIONS if kind.value in row["ms"]):
            p99_ms = row["ms"][kind]["p99"]
            bars.append(at_most(f"{policy}: {kind} p99", p99_ms, TARGET_MS, "ms"))
        rows = {
            kind: {"wall_ms": times, "busy_ms": row["busy_ms"][kind]}
            for kind, times in row["ms"].items()
        }
        memory = (
            f"{row['sessions']} sessions and {row['blocks']} blocks of the prefix index take, in "
            f"MiB: {cell(row['memory_mib'])}. Decided: {cell(row['decisions'])}."
        )
        tables.append(table(f"Policy {policy}", rows, *_COLUMNS, caption=memory))
    return BenchmarkResult(figures=figures, bars=bars, tables=tables)


BENCHMARK = Benchmark(
    "decisions", __doc__, measure_all, full=DecisionOptions(),
    quick=DecisionOptions(sessions=10_000, blocks=100_000, requests=4_000),
    quick_help="a tenth of everything but workers",
)  # fmt: skip
