"""Computes figures, table and bars of the comparison with vLLM's own serving. Pure."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from infra.bench.results import Bar, at_least, at_most, median, median_ratio, table
from infra.bench.vllm.closed_loop import LoadCell

PAIR, VLLM_PAIR = "Trivium 1P+1D", "vLLM 1P+1D"
BOTH, REPLICAS = "Trivium 2 in both roles", "Trivium 2 replicas"
VLLM_REPLICAS = "vLLM 2 replicas"
NAMES = (PAIR, VLLM_PAIR, BOTH, REPLICAS, VLLM_REPLICAS)
PAIR_RATIO, REPLICAS_RATIO, BOTH_RATIO = 1.5, 0.9, 0.9
CellRow = dict[str, Any]
Cells = dict[str, dict[LoadCell, list[CellRow]]]  # by peer and cell; one row per repeat


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
