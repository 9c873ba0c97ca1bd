"""The comparison with vLLM's own serving: the same engines, model, cores and prompts.

`make bench-vllm`, or `trivium bench vllm --quick`. First it compares one prefill and one decode
engine of Trivium with vLLM's behind a two-call proxy. Then it compares Trivium's two workers in
both roles and two replica workers with vLLM's two replicas. In each part all deployments run, and
each cell is measured on one after the other. Writes build/bench/vllm.json.
"""

import itertools
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, measuring, option
from infra.bench.results import BENCH_DIR, Bar, at_least, at_most, median, median_ratio, table
from infra.bench.stacks import running_broker
from infra.bench.vllm.closed_loop import TOKENS, ConversationStreams, LoadCell
from infra.bench.vllm.contenders import ENGINE, MODEL, VllmPeer, give_roles, trivium, vllm_pair
from infra.bench.vllm.streams import MODEL_HELP, plain_words
from infra.stack.plan import StackPlan
from schemas.records import Role
from schemas.settings import ModelSettings
from workers.models.folder import model_folder
from workers.models.wheels import SMOLLM2

PAIR, VLLM_PAIR = "Trivium 1P+1D", "vLLM 1P+1D"
BOTH, REPLICAS = "Trivium 2 in both roles", "Trivium 2 replicas"
VLLM_REPLICAS = "vLLM 2 replicas"
NAMES = (PAIR, VLLM_PAIR, BOTH, REPLICAS, VLLM_REPLICAS)
PAIR_RATIO, REPLICAS_RATIO, BOTH_RATIO = 1.5, 0.9, 0.9
CellRow = dict[str, Any]
Cells = dict[str, dict[LoadCell, list[CellRow]]]  # by peer and cell; one row per repeat
_WARM = LoadCell(streams=4, prompt_tokens=60, turns=2, window_s=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Sets the cells, their duration and the model."""

    streams: tuple[int, ...] = option((1, 4, 16), "closed loops to run")
    prompt_tokens: tuple[int, ...] = option((60, 400), "of openings")
    turns: tuple[int, ...] = option((1, 4), "of conversations")
    seconds: float = option(10.0, "of each cell's window; half as long again at 16 streams")
    repeats: int = option(1, "of every cell")
    model: str = option(SMOLLM2, MODEL_HELP)
    seed: int = option(1)

    def cells(self) -> list[LoadCell]:
        """Return the cells in the order of measurement."""
        return [
            LoadCell(
                streams=streams,
                prompt_tokens=prompt,
                turns=turns,
                window_s=self.seconds * (1.5 if streams >= 16 else 1.0),
            )
            for streams in self.streams
            for prompt in self.prompt_tokens
            for turns in self.turns
        ]


class VllmComparison:
    """Measures all cells of one run."""

    def __init__(self, options: VllmOptions, model: Path) -> None:
        self._options = options
        self._words = plain_words(Tokenizer.from_file(str(model / "tokenizer.json")))
        self.cells: Cells = {}
        self.answers: dict[str, dict[str, tuple[int, ...]]] = {}  # by peer

    async def part(self, name: str, peers: Sequence[VllmPeer]) -> None:
        """Measure every cell on each of these peers in turn, with prompts of this part only."""
        cells = self._options.cells()
        for peer in peers:
            await self._run(peer, _WARM, f"{self._options.seed} warm {name}")
        progress = counting(name, len(cells) * len(peers) * self._options.repeats)
        for repeat in range(self._options.repeats):
            for number, cell in enumerate(cells):
                order = peers[::-1] if (repeat + number) % 2 else peers
                for peer in order:
                    progress(description=f"{name}: {peer.name}, {cell.name}")
                    seed = f"{self._options.seed} {name} {repeat}"
                    measured = await self._run(peer, cell, seed)
                    self.answers.setdefault(peer.name, {}).update(measured.pop("said"))
                    by_cell = self.cells.setdefault(peer.name, {})
                    by_cell.setdefault(cell, []).append(measured)
                    progress(advance=1)

    async def _run(self, peer: VllmPeer, cell: LoadCell, seed: str) -> dict[str, Any]:
        with peer.awake() if peer.freezable else nullcontext():
            return await ConversationStreams(peer.url, MODEL, cell, self._words, seed).measure()


async def run(options: VllmOptions, console: Console) -> BenchmarkResult:
    """Start all deployments, measure every cell, and report."""
    began_s = time.monotonic()
    folder = BENCH_DIR.absolute() / "vllm"
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"Model: {options.model}")
    model = Path(model_folder(ModelSettings(path=options.model)))
    with running_broker(folder) as (bootstrap, _):
        comparison = VllmComparison(options, model)
        await _compare(comparison, bootstrap, model, folder)
    return BenchmarkResult(
        figures={
            "cells": figures(comparison.cells),
            "equal_answers": equal_answers(comparison.answers),
            "elapsed_s": round(time.monotonic() - began_s),
        },
        bars=bars(comparison.cells),
        tables=[summary(comparison.cells)],
        load={"answer_tokens": TOKENS, "engine": ENGINE},
        beside=f"; logs are in {folder}",
    )


async def _compare(comparison: VllmComparison, bootstrap: str, model: Path, folder: Path) -> None:
    async def opened(stack: AsyncExitStack, name: str, opening: Any) -> Any:
        with measuring(f"starting {name}"):
            return await stack.enter_async_context(opening)

    def ours(name: str, plan: StackPlan) -> Any:
        return trivium(name, plan, bootstrap, model, folder)

    async with AsyncExitStack() as all_along:
        pair = await opened(all_along, PAIR, ours("pair", StackPlan(prefill=1, decode=1)))
        url = pair.gateway_urls[0]
        async with AsyncExitStack() as first:
            rival = vllm_pair("vllm-pair", VLLM_PAIR, model, folder, hands_over=True)
            peer: VllmPeer = await opened(first, VLLM_PAIR, rival)
            await comparison.part("disaggregated", [VllmPeer(PAIR, url), peer])
        await give_roles(pair, (Role.PREFILL, Role.DECODE))
        plan = StackPlan(prefill=0, decode=0, replica=2)
        replicas = await opened(all_along, REPLICAS, ours("replicas", plan))
        rival = vllm_pair("vllm-replicas", VLLM_REPLICAS, model, folder, hands_over=False)
        peer = await opened(all_along, VLLM_REPLICAS, rival)
        peers = [VllmPeer(BOTH, url), VllmPeer(REPLICAS, replicas.gateway_urls[0]), peer]
        await comparison.part("replicas", peers)


def rate(figures: CellRow) -> float:
    """Return the answers per second, counted in tokens."""
    return float(figures["requests_per_s"])


def bars(cells: Cells) -> list[Bar]:
    """Return bars on geometric means over the cells with equal numbers of streams."""
    judged = []
    for streams in sorted({cell.streams for cell in cells.get(PAIR, {})}):
        for name, target, ratio in (
            ("1P+1D, of vLLM's rate", PAIR_RATIO, _of(PAIR, VLLM_PAIR)),
            ("replicas, of vLLM's rate", REPLICAS_RATIO, _of(REPLICAS, VLLM_REPLICAS)),
            ("both roles, of the best of all", BOTH_RATIO, _of_best),
        ):
            value = _mean([ratio(cells, cell) for cell in cells[PAIR] if cell.streams == streams])
            judged.append(at_least(f"{name}: {streams} streams", value, target))
    ours = [
        row for name in (PAIR, BOTH, REPLICAS) for rows in cells.get(name, {}).values()
        for row in rows
    ]  # fmt: skip
    return [*judged, at_most("Trivium's errors", _errors(ours), 0)]


def _of(name: str, rival: str) -> Callable[[Cells, LoadCell], float | None]:
    def ratio(cells: Cells, cell: LoadCell) -> float | None:
        if cell not in cells.get(name, {}) or cell not in cells.get(rival, {}):
            return None
        above, below = ([rate(row) for row in cells[peer][cell]] for peer in (name, rival))
        return median_ratio(above, below)

    return ratio


def _of_best(cells: Cells, cell: LoadCell) -> float | None:
    rival_rates = [median([rate(row) for row in cells[n][cell]]) for n in cells if n != BOTH]
    own_rate = median([rate(row) for row in cells.get(BOTH, {}).get(cell, ())])
    best = max((value for value in rival_rates if value), default=None)
    return None if own_rate is None or best is None else own_rate / best


def _mean(ratios: list[float | None]) -> float | None:
    """Return the geometric mean, or None if a ratio is missing."""
    positive_ratios = [ratio for ratio in ratios if ratio]
    if not positive_ratios or len(positive_ratios) < len(ratios):
        return None
    return math.exp(sum(map(math.log, positive_ratios)) / len(positive_ratios))


def figures(cells: Cells) -> dict[str, Any]:
    """Return every repeat of every cell, by peer and cell."""
    return {
        name: {cell.name: repeats for cell, repeats in by_cell.items()}
        for name, by_cell in cells.items()
    }


def equal_answers(answers: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Return for each two peers the number of common conversations and of equal answers."""
    pairs = {}
    for first, second in itertools.combinations(answers, 2):
        both = answers[first].keys() & answers[second].keys()
        if both:
            equal = sum(answers[first][prompt] == answers[second][prompt] for prompt in both)
            pairs[f"{first} and {second}"] = {"answers": len(both), "equal": equal}
    return pairs


def summary(cells: Cells) -> Table:
    """Return the table of requests/s, TTFT p50 in ms and errors, a row for each cell and peer."""
    rows = {
        f"{cell.name}: {name}": {
            "requests_per_s": median([rate(row) for row in repeats]),
            "ttft_ms_p50": median([row["ttft_ms"]["p50"] for row in repeats]),
            "errors": _errors(repeats),
        }
        for cell in cells.get(PAIR, {})
        for name in NAMES
        if (repeats := cells.get(name, {}).get(cell))
    }
    return table("Cells by peer", rows)


def _errors(repeats: list[CellRow]) -> int:
    return sum(sum(row["errors"].values()) for row in repeats)


BENCHMARK = Benchmark(
    "vllm", __doc__, run, full=VllmOptions(),
    quick=VllmOptions(streams=(4, 16), prompt_tokens=(60,), turns=(1, 4), seconds=4.0),
    quick_help="few cells, in about six minutes",
)  # fmt: skip
