"""Computes figures, table and bars of the comparison with vLLM's own serving. Pure."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from infra.bench.results import Bar, at_least, at_most, median, median_ratio
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
            judged.append(at_least(f"{name}: {streams} streams", value, target, ""))
    ours = [row for name in (PAIR, BOTH, REPLICAS) for row in _all(cells.get(name, {}))]
    errors = sum(sum(row["errors"].values()) for row in ours)
    return [*judged, at_most("Trivium's errors", errors, 0, "")]


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


def _all(by_cell: Mapping[LoadCell, list[CellRow]]) -> list[CellRow]:
    return list(itertools.chain.from_iterable(by_cell.values()))


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


def table(cells: Cells) -> Table:
    """Return the table of requests/s and TTFT p50, a row for each cell."""
    names = [name for name in NAMES if name in cells]
    result = Table("cell", *names, title="requests/s, TTFT p50 in ms")
    for cell in cells[names[0]]:
        texts = [_text(cells[name].get(cell, [])) for name in names]
        result.add_row(cell.name, *texts)
    return result


def _text(repeats: list[CellRow]) -> str:
    per_s = median([rate(row) for row in repeats])
    first_ms = median([row["ttft_ms"]["p50"] for row in repeats])
    errors = sum(sum(row["errors"].values()) for row in repeats)
    return (
        ("-" if per_s is None else f"{per_s:.2f}")
        + ("" if first_ms is None else f", {first_ms:.0f}")
        + (f", {errors} errors" if errors else "")
    )
