"""The control loop that ships, live, beside fixed settings: a step in probes, and one in prefill
searches.

A retrieval worker's engine and its control loop, in this process and in real time, without a log.
Searches arrive at random, at shares of what the engine can do on this machine. The loop has its
three signals: prefill's wait from the engine; from heartbeats the share of decode time that is
stalled, which follows from how long the probes took, and the KV that is moved, which follows from
the prefill searches that ended in time. A miss is a prefill search that ends after its deadline, or
a probe that decoding has to wait for.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table

from infra.bench.results import Bar, at_most, median
from schemas.errors import TriviumError
from schemas.fleet import HEARTBEAT_MS, FleetView
from schemas.log.clock import wall_ms
from schemas.records import (
    Capability,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from workers.search.engine.engine import EngineSettings, SearchEngine
from workers.search.index.index import Index
from workers.search.index.kinds import Kind
from workers.search.index.query import Query
from workers.search.service.control_loop import ControlLoop
from workers.search.service.fleet_figures import FleetFigures
from workers.search.service.settings import RetrievalSettings

_ROWS, _DIM = 20_000, 96
_EFFORT: Mapping[Kind, Any] = {
    Kind.PREFILL: {"k": 32, "top_m": 384},
    Kind.DECODE: {"k": 4, "top_m": 32},
}
_DECODE_MS = 250.0  # of a sequence, between two probes: 32 tokens
_LOOKAHEAD_MS = 30.0  # so long a probe may take until decoding waits: 4 tokens
_DEADLINE_MS = (40.0, 120.0)  # of a prefill search after it came
_KV_BYTES = 1 << 20  # that move for a prompt whose search ended in time
_MEASURED_S = 0.5
_CALM = (0.4, 0.2)  # of what the engine can do, for prefill and for decode
STEPS = {
    "step in probes": (_CALM, (0.3, 0.55), _CALM),
    "step in prefill searches": (_CALM, (0.65, 0.2), _CALM),
}
LOOP = "control loop"
FIXED = ((0.0, 50.0), (0.5, 5.0), (0.0, 5.0), (0.3, 20.0), (0.8, 2.0))  # share, flush in ms
_AGENT = Registration(
    member_id="decode", epoch=1, kind=MemberKind.WORKER, roles=(Role.DECODE,), started_ms=0,
    capability=Capability(
        model="m", engine="sim", engine_id="e", block_size=16, max_model_len=4_096, running_max=64
    ),
)  # fmt: skip


@dataclass(slots=True)
class Seen:
    """What became of the searches of one run."""

    searches: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(_EFFORT, 0))
    missed: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(_EFFORT, 0))
    stalled_ms: float = 0.0
    kv_bytes: int = 0
    moves: int = 0
    signals: list[str] = field(default_factory=list)  # names of those that were there

    def add(self, kind: Kind, took_ms: float, *, late: bool) -> None:
        self.searches[kind] += 1
        self.missed[kind] += late
        if kind is Kind.DECODE:
            self.stalled_ms += max(0.0, took_ms - _LOOKAHEAD_MS)
        elif not late:
            self.kv_bytes += _KV_BYTES

    def beat(self, seq: int, before: "Seen") -> Heartbeat:
        """What a decode worker says of the time since a heartbeat."""
        stalled_ms = self.stalled_ms - before.stalled_ms
        count = self.searches[Kind.DECODE] - before.searches[Kind.DECODE]
        share = stalled_ms / (stalled_ms + count * _DECODE_MS) if count else None
        load = Load(stalled_share=share, kv_bytes_received=self.kv_bytes)
        return Heartbeat(
            member_id="decode", epoch=1, seq=seq, at_ms=wall_ms(), state=MemberState.READY,
            load=load,
        )  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """As they are reported."""
        misses = {kind.name.lower(): self.missed[kind] for kind in _EFFORT}
        total = sum(self.searches.values())
        share = sum(self.missed.values()) / total if total else None
        return {
            "searches": total, "missed": misses, "missed_share": share, "moves": self.moves,
            "signals": sorted(set(self.signals)),
        }  # fmt: skip


class Pool:
    """An engine with an index, and what it can do."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._rng = random.Random(seed)
        rows = rng.normal(size=(_ROWS, _DIM)).astype(np.float32)
        self.index = Index.build(rows)
        self._queries = rng.normal(size=(1_024, _DIM)).astype(np.float32)
        self.engine = SearchEngine(EngineSettings(scheduler=RetrievalSettings().scheduler()))
        self.per_s: dict[Kind, float] = {}

    async def prepare(self) -> None:
        """Measure how many searches of each kind a second has room for."""
        for kind in _EFFORT:
            seen, end_s = Seen(), time.monotonic() + _MEASURED_S

            async def ask(kind: Kind = kind, seen: Seen = seen, end_s: float = end_s) -> None:
                while time.monotonic() < end_s:
                    await self.search(kind, seen, 10_000)

            await asyncio.gather(*(ask() for _ in range(2 * self.engine.load().places)))
            self.per_s[kind] = seen.searches[kind] / _MEASURED_S

    async def search(self, kind: Kind, seen: Seen, within_ms: float) -> None:
        """One search, and what became of it."""
        began_s, vector = time.monotonic(), self._rng.choice(self._queries)
        deadline_ms = wall_ms() + round(within_ms) if kind is Kind.PREFILL else None
        query = Query(vector=vector, kind=kind, deadline_ms=deadline_ms, **_EFFORT[kind])
        try:
            await self.engine.search(self.index, query)
            failed = False
        except TriviumError:
            failed = True
        took_ms = (time.monotonic() - began_s) * 1000
        limit_ms = within_ms if kind is Kind.PREFILL else _LOOKAHEAD_MS
        seen.add(kind, took_ms, late=failed or took_ms > limit_ms)

    async def play(
        self, step: str, phase_s: float, seed: int, fixed: tuple[float, float] | None
    ) -> Seen:
        """The same arrivals for every setting; None: the control loop moves them."""
        seen, calls = Seen(), []
        link = _CALM[0] * self.per_s[Kind.PREFILL] * _KV_BYTES
        settings = RetrievalSettings(link_target_bytes_per_s=link / 2)
        share, flush_ms = fixed or (settings.share, settings.flush_ms)
        self.engine.set_share(share, flush_ms)
        lives = [] if fixed else [asyncio.create_task(self._control(settings, seen))]
        began_s = time.monotonic()
        for at_s, kind, within_ms in self._arrivals(step, phase_s, seed):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            calls.append(asyncio.create_task(self.search(kind, seen, within_ms)))
        await asyncio.gather(*calls)
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        return seen

    def _arrivals(self, step: str, phase_s: float, seed: int) -> list[tuple[float, Kind, float]]:
        """When, of which kind, and with how much time."""
        rng, found = random.Random(seed), []
        for number, loads in enumerate(STEPS[step]):
            for kind, load in zip(_EFFORT, loads, strict=True):
                at_s = rng.expovariate(load * self.per_s[kind])
                while at_s < phase_s:
                    found.append((number * phase_s + at_s, kind, rng.uniform(*_DEADLINE_MS)))
                    at_s += rng.expovariate(load * self.per_s[kind])
        return sorted(found, key=lambda each: each[0])

    async def _control(self, settings: RetrievalSettings, seen: Seen) -> None:
        """The loop of a retrieval worker, and the heartbeats that it reads."""
        view, figures = FleetView(), FleetFigures()
        view.apply(_AGENT, 0, wall_ms())
        member: Any = SimpleNamespace(view=view, member_id="bench")
        loop = ControlLoop(
            settings, self.engine, settings.share, settings.flush_ms, figures, member,
            None,  # type: ignore[arg-type]  # nothing is written down
        )  # fmt: skip
        before, seq, beat_ms = Seen(), 0, 0
        while True:
            now_ms = wall_ms()
            if now_ms - beat_ms >= HEARTBEAT_MS:
                seq, beat_ms = seq + 1, now_ms
                beat = seen.beat(seq, before)
                view.apply(beat, seq, now_ms)
                figures.fold(beat)
                before = Seen(dict(seen.searches), dict(seen.missed), seen.stalled_ms)
            move = loop.look(now_ms)
            seen.moves += not move.is_still
            told = vars_of(move.signals)
            seen.signals += [name for name, value in told.items() if value is not None]
            await asyncio.sleep(settings.control_interval_ms / 1000)


def vars_of(signals: Any) -> dict[str, float | None]:
    """Fields of a record with slots."""
    return {name: getattr(signals, name) for name in signals.__slots__}


async def measure(
    phase_s: float, settings: int, repeats: int, seed: int, progress: Progress
) -> Mapping[str, Any]:
    """Misses by step and setting, the median of as many runs; settings take turns."""
    pool = await asyncio.to_thread(Pool, seed)
    ways = {LOOP: None, **{_named(each): each for each in FIXED[:settings]}}
    found: dict[str, Any] = {}
    try:
        await pool.prepare()
        for step in STEPS:
            task = progress.add_task(step, total=repeats * len(ways))
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
            for number in range(repeats):
                for name, fixed in ways.items():
                    seen = await pool.play(step, phase_s, seed + number, fixed)
                    runs[name].append(seen.figures())
                    progress.advance(task)
            found[step] = {name: _middle(rows) for name, rows in runs.items()}
    finally:
        await pool.engine.close()
    return {"searches_per_s": {k.name.lower(): v for k, v in pool.per_s.items()}, "steps": found}


def _named(fixed: tuple[float, float]) -> str:
    return f"share {fixed[0]:g}, flush {fixed[1]:g} ms"


def _middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last run, with the median of what was missed."""
    return {**rows[-1], "missed_share": median([row["missed_share"] for row in rows])}


def bars(found: Mapping[str, Any] | None) -> list[Bar]:
    """The loop misses no more than the best fixed setting; a hundredth of all is noise."""
    said = []
    for step, rows in (found or {"steps": {}})["steps"].items():
        best = min(row["missed_share"] for name, row in rows.items() if name != LOOP)
        more = rows[LOOP]["missed_share"] - best
        said.append(at_most(f"misses above the best fixed setting, {step}", more, 0.01, "share"))
    return said


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Misses by setting."""
    if "control" not in found:
        return []
    table = Table("step", "setting", "searches", "missed", "prefill", "probes", "moves", "signals")
    for step, rows in found["control"]["steps"].items():
        for name, row in rows.items():
            table.add_row(
                step, name, str(row["searches"]), f"{row['missed_share']:.1%}",
                *(str(count) for count in row["missed"].values()),
                str(row["moves"]), str(len(row["signals"])),
            )  # fmt: skip
    return [table]
