"""Part of the search benchmark: the time that the log adds to a retrieval, over a call in process.

Runs a broker, one retrieval worker process and a client in this process, and the same index in this
process. Both get the same queries in the same Poisson arrivals, in turns, at a rate at which every
retrieval finds all processes idle, and at one at which retrievals overlap. Times count from when an
arrival was due, less the error of the event loop's timer, which wakes up to 1 ms late.
"""

import asyncio
import dataclasses
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infra.bench.meters import CpuMeter
from infra.bench.results import BENCH_DIR, Bar, at_most, median, percentile, percentiles
from infra.bench.search import vectors
from infra.bench.search.scene import Progress, SearchOptions, SearchScene
from infra.bench.stacks import running_log
from infra.processes.supervisor import ProcessSpec, Supervisor
from schemas.codec import Codec
from schemas.errors import NotReady, TriviumError
from schemas.records import Document
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.documents import send_document
from streams.log.retrieval.client import RetrievalClient, open_retrieval_client
from streams.log.retrieval.results import layout_of
from workers.vector.engine.engine import SearchEngine
from workers.vector.index.index import Index
from workers.vector.index.query import Query
from workers.vector.kernels.arrays import Array

Ask = Callable[[Array], Awaitable[list[int]]]  # vector to its nearest rows

RATES_PER_S = (1, 200)
IN_PROCESS, KAFKA = "in process", "through Kafka"
K, TOP_M, DEADLINE_MS = 10, 64, 2_000
_COLLECTION = "bench"
_WORKER = "retrieval-bench"
_WARM_UP_PER_S = 200
_TIMER_S = 0.001
_UNDER_WAY = 1_000  # documents sent and not acknowledged
_READY_TIMEOUT_S = 120
_LOOK_S = 0.05


@dataclass(slots=True)
class LogCell:
    """The figures of one way at one rate, over all repeats."""

    took_ms: list[list[float]] = field(default_factory=list)  # by repeat
    recalls: list[float] = field(default_factory=list)
    errors: int = 0
    cpu_ms: dict[str, float] = field(default_factory=dict)  # by process

    def figures(self) -> dict[str, Any]:
        times_ms = [ms for repeat in self.took_ms for ms in repeat]
        return {
            **percentiles(times_ms, prefix="ms_p"),
            "ms_p50_by_repeat": [percentile(repeat, 50) for repeat in self.took_ms],
            "retrievals": len(times_ms),
            "errors": self.errors,
            "recall": sum(self.recalls) / max(1, len(self.recalls)),
            "cpu_ms": {name: used / max(1, len(times_ms)) for name, used in self.cpu_ms.items()},
        }


@dataclass(frozen=True, slots=True)
class LogScene:
    """The queries, their true neighbours, and both ways to search."""

    queries: Array
    truth: Array
    ways: dict[str, Ask]
    pids: dict[str, int]


def kafka(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 7: measure the time that Kafka adds to a retrieval."""
    options, progress = scene.options, scene.progress
    folder = BENCH_DIR.absolute() / "search-kafka"
    shutil.rmtree(folder, ignore_errors=True)
    logging.getLogger("aiokafka").setLevel(logging.ERROR)  # it warns of new topics without leaders
    progress("a broker starts")
    with running_log(folder) as (log, broker_pid):
        return asyncio.run(_measure(options, log, broker_pid, folder, progress))


async def _measure(
    options: SearchOptions, log: LogSettings, broker_pid: int, folder: Path, progress: Progress
) -> tuple[dict[str, Any], list[Bar]]:
    rows, queries = vectors.overlapping(
        options.kafka_rows, options.queries, dim=options.dim, seed=options.seed
    )
    progress(f"{len(rows)} documents go to the log, and are linked by a worker and here")
    await _load(log, rows)
    async with _worker(log, folder) as (asker, pid):
        index = await asyncio.to_thread(Index.build, rows, seed=options.seed)
        engine = SearchEngine()
        ways = {IN_PROCESS: _in_process(engine, index), KAFKA: _through(asker)}
        pids = {"broker": broker_pid, "retrieval worker": pid}
        scene = LogScene(queries, vectors.truth(rows, queries, K), ways, pids)
        cells = await _cells(scene, options, progress)
        await engine.close()
    figures = {str(rate): _row(of_rate) for rate, of_rate in cells.items()}
    return {"at_rate": figures, "rows": len(rows), "k": K, "top_m": TOP_M}, _bars(figures)


async def _cells(
    scene: LogScene, options: SearchOptions, progress: Progress
) -> dict[int, dict[str, LogCell]]:
    progress("both ways are warmed up")
    for way in scene.ways:
        await _play(scene, way, LogCell(), _WARM_UP_PER_S, options.kafka_warm_up, seed=0)
    cells = {rate: {way: LogCell() for way in scene.ways} for rate in RATES_PER_S}
    for repeat in range(options.repeats):
        for rate, by_way in cells.items():
            count = max(options.kafka_least, int(rate * options.load_s))
            progress(f"{count} retrievals at {rate}/s both ways, repeat {repeat + 1}")
            for way, cell in by_way.items():
                await _play(scene, way, cell, rate, count, seed=options.seed + repeat)
    return cells


async def _play(
    scene: LogScene, way: str, cell: LogCell, rate_per_s: int, count: int, seed: int
) -> None:
    """Send queries at times that the seed decides, one way, and add the results to the cell."""
    random = np.random.default_rng(seed)
    due_s = np.cumsum(random.exponential(1 / rate_per_s, count)).tolist()
    chosen = random.integers(0, len(scene.queries), count).tolist()
    ask, times_ms = scene.ways[way], []
    meter, own_s = CpuMeter(scene.pids), time.process_time()

    async def retrieve(counted_s: float, query: int) -> None:
        try:
            rows = await ask(scene.queries[query])
        except TriviumError:
            cell.errors += 1
            return
        times_ms.append((time.perf_counter() - counted_s) * 1_000)
        cell.recalls.append(len(set(rows) & set(scene.truth[query].tolist())) / K)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as under_way:
        for at_s, query in zip(due_s, chosen, strict=True):
            if (wait_s := began_s + at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            counted_s = min(time.perf_counter(), began_s + at_s + _TIMER_S)
            under_way.create_task(retrieve(counted_s, query))
    cell.took_ms.append(times_ms)
    for name, used_s in {"benchmark": time.process_time() - own_s, **meter.used_s()}.items():
        cell.cpu_ms[name] = cell.cpu_ms.get(name, 0.0) + used_s * 1_000


def _in_process(engine: SearchEngine, index: Index) -> Ask:
    async def ask(vector: Array) -> list[int]:
        query = Query(vector=vector, k=K, top_m=TOP_M, deadline_ms=wall_ms() + DEADLINE_MS)
        rows: list[int] = (await engine.search(index, query)).rows.tolist()
        return rows

    return ask


def _through(asker: RetrievalClient) -> Ask:
    async def ask(vector: Array) -> list[int]:
        answer = await asker.search(
            vector, collection=_COLLECTION, k=K, top_m=TOP_M, deadline_ms=wall_ms() + DEADLINE_MS
        )
        return [int(hit.document_id) for hit in answer.hits]

    return ask


async def _load(log: LogSettings, rows: Array) -> None:
    making = LogProducer(log, Codec(), durable=True, client_id="bench-documents")
    async with making as producer:
        acks: list[Any] = []
        for row, vector in enumerate(rows):
            document = Document(
                document_id=str(row), collection=_COLLECTION, vector=pack_vector(vector),
                at_ms=wall_ms(),
            )  # fmt: skip
            acks.append(await send_document(producer, log, document))
            if len(acks) >= _UNDER_WAY:
                await asyncio.gather(*acks)
                acks.clear()
        await asyncio.gather(*acks)


@asynccontextmanager
async def _worker(log: LogSettings, folder: Path) -> AsyncIterator[tuple[RetrievalClient, int]]:
    """Yield a retrieval client, and the process id of a retrieval worker that is ready."""
    log_env = {f"TRIVIUM_LOG_{k.upper()}": str(v) for k, v in dataclasses.asdict(log).items() if v}
    log_env["TRIVIUM_RETRIEVAL_METRICS"] = f"{_COLLECTION}=sqeuclidean"
    spec = ProcessSpec(
        name=_WORKER,
        command=(sys.executable, "-m", "infra.cli.app", "run", "retrieval", "--id", _WORKER),
        log_file=folder / "retrieval.log",
        env={**os.environ, "TRIVIUM_HOME": str(folder), **log_env},
        restart=False,
    )
    supervisor = Supervisor()
    process = supervisor.start(spec)
    try:
        async with open_retrieval_client(log, Codec(), "bench-asker") as asker:
            until_s = time.monotonic() + _READY_TIMEOUT_S
            while not layout_of(asker.membership.view, wall_ms()).living:
                if process.exit_code is not None or time.monotonic() > until_s:
                    raise NotReady(f"the retrieval worker is not ready; see {spec.log_file}")
                await asyncio.sleep(_LOOK_S)
            yield asker, process.pid
    finally:
        await supervisor.stop()


def _row(cells: dict[str, LogCell]) -> dict[str, Any]:
    ways = {way: cell.figures() for way, cell in cells.items()}
    row: dict[str, Any] = {"ways": ways}
    for percent in (50, 99):
        row[f"added_ms_p{percent}"] = median(
            [
                _difference(through, here, percent)
                for through, here in zip(
                    cells[KAFKA].took_ms, cells[IN_PROCESS].took_ms, strict=True
                )
            ]
        )
    return row


def _difference(above: Sequence[float], below: Sequence[float], percent: int) -> float | None:
    high, low = percentile(above, percent), percentile(below, percent)
    return None if high is None or low is None else high - low


def _bars(figures: dict[str, Any]) -> list[Bar]:
    alone, busy = (figures[str(rate)] for rate in RATES_PER_S)
    return [
        at_most("added by the log at 1 retrieval/s, p50", alone["added_ms_p50"], 5, "ms"),
        at_most("added by the log at 200 retrievals/s, p50", busy["added_ms_p50"], 5, "ms"),
        at_most("added by the log at 200 retrievals/s, p99", busy["added_ms_p99"], 20, "ms"),
    ]
