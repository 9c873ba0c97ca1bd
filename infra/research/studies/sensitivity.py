"""Table 1 without the constants that were chosen to fit, on a part of the grid.

Two constants of the model were chosen to match published figures
(`infra/planning/authors_serving.py`): steps of 512 tokens beside a batch, and the delay of a
prefill worker by the authors' connector. Each is replaced by its value without that choice. All
runs are behind the authors' proxy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infra.planning.grid import RATIOS, Workload, static
from infra.planning.point import SETUP, Spec
from infra.planning.runs import Points, Runner, points_of, specs_of
from infra.research.paper.paper_tables import change_by_level

VLLM_STEP_TOKENS = 8_192  # vLLM's default on an H100, which the authors leave as it is
AS_CHOSEN = "as chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRow:
    """Changes of turn-2 TTFT from plain x=0 to x=1 with one constant varied: medians, percent."""

    name: str
    pools: str
    change: dict[str, float]  # by level of load


def _variations(spec: Spec) -> dict[str, Spec]:
    steps = replace(SETUP, mixed_chunk_tokens=VLLM_STEP_TOKENS)
    return {
        f"steps of {VLLM_STEP_TOKENS:,} tokens": replace(spec, setup=steps),
        "no connector time": replace(spec, connector_ms=0.0),
    }


def run_variations(
    runner: Runner,
    points: Points,
    workloads: Sequence[Workload],
    loads: Sequence[float],
    seed: int,
) -> list[SensitivityRow]:
    """Return table 1 as chosen, from the grid's points, and for each variation."""
    specs: dict[str, list[Spec]] = {}
    configs = [static(pools, share, plain=True) for pools in RATIOS for share in ("0", "1")]
    for spec in specs_of(configs, workloads, loads, seed):
        for name, variation in _variations(spec).items():
            specs.setdefault(name, []).append(variation)
    runs = runner.map(
        "sensitivity", points_of, [spec for group in specs.values() for spec in group]
    )
    rows = _changes(AS_CHOSEN, points.subset(workloads, loads))
    for name, group in specs.items():
        group_runs, runs = runs[: len(group)], runs[len(group) :]
        rows += _changes(name, Points(point for run in group_runs for point in run))
    return rows


def _changes(name: str, points: Points) -> list[SensitivityRow]:
    rows = []
    for pools in RATIOS:
        x0, x1 = (static(pools, share, plain=True) for share in ("0", "1"))
        change = change_by_level(points, x0, x1, lambda point: point.decode_ttft)
        rows.append(SensitivityRow(name=name, pools=pools, change=change))
    return rows
