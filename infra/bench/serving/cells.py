"""Runs the cells of the serving benchmark, one after the other, through the load generator.

Decides what to measure in which order. `figures.py` computes the figures.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infra.bench.benchmark import counting, option
from infra.bench.meters import CpuMeter
from infra.bench.serving.contenders import HTTPX, MODEL, NAMES, REMOTE, REPLICA, ServingPeer
from infra.bench.serving.figures import Cell, Cells
from infra.bench.serving.load_generator import OfferedLoad
from infra.bench.serving.sse_client import chat_body
from infra.bench.stacks import HOST
from workers.models.sim import make_tokenizer

PROMPTS, PROMPT_WORDS, TOKENS = 32, 64, 64
TRIVIUM = (REPLICA, REMOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Sets the loads, the peers and the durations."""

    streams: tuple[int, ...] = option((1, 16, 64, 256, 512), "closed loops to run")
    repeats: int = option(5, "of the closed loops")
    seconds: float = option(4.0, "of each cell's window")
    settle_s: float = 1.0
    warm_up_s: float = option(60.0, "seconds of load before")
    rates: tuple[float, ...] = option(
        (100, 200, 400, 600, 800, 1_000, 1_200, 1_500), "open loops to run, in req/s"
    )
    open_repeats: int = option(2, "of the open loops; 0 leaves them out")
    prompt_words: tuple[int, ...] = option(
        (64, 1_000, 10_000, 100_000), "lengths of prompts whose cost is counted"
    )
    peers: tuple[str, ...] = option(NAMES, "which to compare", choices=NAMES)
    seed: int = option(1)
    httpx_streams_max: int = 256  # it collapses beyond this


QUICK = ServingOptions(
    repeats=1, seconds=1.5, settle_s=0.7, warm_up_s=12, rates=(100, 400, 800), open_repeats=1,
    prompt_words=(1_000, 100_000),
)  # fmt: skip


class Generator:
    """Runs the load generator as a separate process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "Generator":
        command = (sys.executable, "-m", "infra.bench.serving.load_generator")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        return cls(process)

    async def run(self, load: OfferedLoad) -> dict[str, Any]:
        """Send one load to the generator and return its figures; raises RuntimeError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        line = await stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended; its message is above")
        measured: dict[str, Any] = json.loads(line)
        return measured

    async def stop(self) -> None:
        """Close the generator's input and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class ServingComparison:
    """Measures all cells of one run."""

    def __init__(
        self, options: ServingOptions, peers: dict[str, ServingPeer], generator: Generator
    ) -> None:
        self._options = options
        self._peers = peers
        self._generator = generator
        self._bodies = make_bodies(options.seed)
        self._expected: Sequence[str] = ()
        self.closed: Cells = {}
        self.open: Cells = {}
        self.idle: dict[str, dict[str, float]] = {}

    async def check_answers(self) -> None:
        """Raise RuntimeError unless every peer gives the first peer's answers, token for token."""
        for name in self._peers:
            cell = await self._cell(name, streams=4, requests_max=PROMPTS, window_s=60)
            if cell["errors"]:
                raise RuntimeError(f"{name}: wrong answers before any load: {cell['errors']}")
            self._expected = self._expected or cell["texts"]

    async def measure_idle(self, seconds: float) -> None:
        """Measure the cores that each process uses without any request."""
        meters = {name: CpuMeter(peer.pids()) for name, peer in self._peers.items()}
        await asyncio.sleep(seconds)
        for name, meter in meters.items():
            self.idle[name] = {k: round(v / seconds, 3) for k, v in meter.used_s().items()}

    async def warm_up(self) -> None:
        """Send load until the broker and all other processes are warm."""
        names = [name for name in TRIVIUM if name in self._peers]
        progress = counting("warming up", 2 * len(names))
        for streams in (64, 256):
            for name in names:
                window_s = self._options.warm_up_s / 2 / len(names)
                await self._cell(name, streams=streams, settle_s=0, window_s=window_s)
                progress(advance=1)

    async def run_closed(self) -> None:
        """Run closed loops: all peers one after the other at each number of streams."""
        options = self._options
        progress = counting("closed loop", self._closed_cells())
        for repeat in range(options.repeats):
            for streams in options.streams:
                for name in self._in_turn(repeat):
                    if name == HTTPX and streams > options.httpx_streams_max:
                        continue
                    progress(description=f"closed loop: {name}, {streams} streams")
                    cell = await self._cell(name, streams=streams)
                    self.closed.setdefault(name, {}).setdefault(streams, []).append(cell)
                    progress(advance=1)

    async def run_open(self) -> None:
        """Run open loops with rising rates, for each peer until it no longer keeps up."""
        options = self._options
        cells = len(options.rates) * len(self._peers) * options.open_repeats
        progress = counting("open loop", cells)
        for repeat in range(options.open_repeats):
            saturated: set[str] = set()
            for rate in options.rates:
                for name in self._in_turn(repeat):
                    progress(advance=1)
                    if name in saturated:
                        continue
                    progress(description=f"open loop: {name}, {rate:g} req/s")
                    seed = options.seed + repeat
                    cell = await self._cell(name, rate_per_s=rate, seed=seed, drain_s=5)
                    self.open.setdefault(name, {}).setdefault(rate, []).append(cell)
                    if not keeps_up(rate, cell):
                        saturated.add(name)

    def _in_turn(self, repeat: int) -> list[str]:
        names = list(self._peers)
        return names[::-1] if repeat % 2 else names

    def _closed_cells(self) -> int:
        options = self._options
        skipped = sum(s > options.httpx_streams_max for s in options.streams)
        cells = len(options.streams) * len(self._peers) - skipped * (HTTPX in self._peers)
        return cells * options.repeats

    async def _cell(self, name: str, **load: Any) -> Cell:
        options, peer = self._options, self._peers[name]
        times = {"settle_s": options.settle_s, "window_s": options.seconds}
        meter, started_s = CpuMeter(peer.pids()), time.monotonic()
        cell: Cell = await self._generator.run(
            OfferedLoad(
                host=HOST,
                port=peer.port,
                bodies=self._bodies,
                expected=self._expected,
                tokens=TOKENS,
                **{**times, **load},
            )
        )
        used_s, requests = meter.used_s(), cell["requests"]
        cell["cpu_ms"] = {k: 1e3 * v / requests for k, v in used_s.items()} if requests else {}
        elapsed_s = time.monotonic() - started_s
        ours_s = sum(used_s.values()) + cell["client_cpu_share"] * elapsed_s
        cell["other_cpu_share"] = round(max(0.0, meter.machine_s() - ours_s) / elapsed_s, 3)
        return cell


def keeps_up(rate: float, cell: Cell) -> bool:
    """Return whether a peer answered an open loop at its rate, without errors or long waits."""
    p99_ms = cell["ttft_ms"]["p99"]
    on_time = p99_ms is not None and p99_ms < 1_000
    return not cell["errors"] and on_time and cell["requests_per_s"] > 0.9 * rate


def make_bodies(
    seed: int, *, words: int = PROMPT_WORDS, count: int = PROMPTS, tokens: int = TOKENS
) -> list[str]:
    """Return chat bodies with random words from the simulated model's vocabulary."""
    vocabulary = make_tokenizer().get_vocab()
    terms = sorted(token[1:] for token in vocabulary if token.startswith("Ġ") and len(token) > 3)
    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(terms, k=words)) for _ in range(count)]
    return [chat_body(MODEL, prompt, tokens) for prompt in prompts]
