"""The comparison of placements: loads, then one parameter at a time, and break-even points.

Every placement has the same GPUs, index and requests. For each varied parameter, the load is a
share of the most that the pool placement (c) serves there, so that no comparison is of idle or
overloaded placements.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from infra.planning.hardware import IndexSpec, SearchCosts, parallel
from infra.planning.pools import ProbeSettings, TrafficModel, prompt_ms
from infra.planning.runs import Runner
from infra.research.trinity import rag_cluster
from infra.research.trinity.placements import KINDS, LOCAL_MS, POOL, PlacementKind
from infra.research.trinity.rag_cluster import TrinityCase, TrinityResult
from infra.research.trinity.roofline import Curve, curves
from infra.simulator.machine.latency import QWEN_30B, Setup
from schemas.errors import ConfigError

LOADS = (0.4, 0.7, 0.9, 1.1)  # shares of the most that (c) serves
LOAD = 0.8
EQUAL = 0.01  # figures with a smaller relative difference count as equal


@dataclass(frozen=True, slots=True)
class PlacementMetric:
    """A figure by which placements are compared."""

    name: str
    field: str
    more_is_better: bool = False


METRICS = (
    PlacementMetric("TTFT p50", "ttft_p50"),
    PlacementMetric("TTFT p99", "ttft_p99"),
    PlacementMetric("TPOT p50", "tpot_p50"),
    PlacementMetric("tokens/s", "tokens_per_s", more_is_better=True),
    PlacementMetric("within targets", "good_share", more_is_better=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One value of a varied parameter: for each placement a result, or why there is none."""

    value: float
    per_s: float
    results: dict[str, TrinityResult]
    impossible: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The value at which (c) becomes better or worse than another placement."""

    metric: str
    rival: str
    at: float | None  # None: nowhere in the range
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Results over the values of one parameter."""

    name: str
    unit: str
    points: list[SweepPoint]
    even: list[BreakEven] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The time of a prompt's collectives, compared with what a search in the node saves."""

    degree: int
    prompt_ms: float
    collective_ms: float
    crossing_ms: float  # with one GPU of the worker on another node
    saved_ms: float


@dataclass(slots=True, kw_only=True)
class TrinityFindings:
    """All results of the comparison; times in ms."""

    seed: int
    quick: bool
    base: TrinityCase
    per_s: float  # most requests/s of (c)
    sweeps: list[Sweep] = field(default_factory=list)
    collectives: list[Collectives] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    seconds: float = 0.0


def base(
    *,
    setup: Setup | None = None,
    search: SearchCosts | None = None,
    gpus: int = 16,
    every: int = 32,
    hop_ms: float = 3.0,
    seed: int = 1,
    duration_ms: float = 3_000.0,
) -> TrinityCase:
    """Return the base case of all variations: chats of 1 000 + 1 024 tokens, 256 answered."""
    traffic = TrafficModel(
        per_s=1.0,
        prompt_tokens=1_000,
        answer_tokens=256,
        probing=ProbeSettings(every=every),
        updates_per_s=100.0,
    )
    return TrinityCase(
        kind=POOL,
        traffic=traffic,
        setup=setup or Setup(),
        search=search or SearchCosts(),
        gpus=gpus,
        hop_ms=hop_ms,
        seed=seed,
        duration_ms=duration_ms,
    )


Variation = tuple[str, str, Sequence[float], Callable[[TrinityCase, float], TrinityCase]]


def variations(*, quick: bool) -> list[Variation]:
    """Return each parameter with its values; fewer values with `quick`."""
    every: list[Variation] = [
        ("probes", "per 1 000 tokens of an answer", (0, 8, 16, 32, 64), _probes),
        ("lookahead of probes", "tokens", (0, 1, 4), _lookahead),
        ("index", "million vectors", (1, 10, 20, 25, 30, 60), _rows),
        ("rows that a search looks at", "times 3 500", (1, 16, 64, 256), _effort),
        ("documents changed", "per s", (0, 100, 400), _updates),
        ("hop over the log", "ms, one way", (0.05, 1, 3, 12), _hop),
        ("tensor parallelism", "GPUs a worker", (1, 2, 4, 8), _degree),
        (
            "displaced experts",
            "share of them, Qwen3-30B-A3B, 8 GPUs a worker, 32 GPUs",
            (0, 0.125, 0.25, 0.5),
            _displaced,
        ),
    ]
    step = 3 if quick else 1
    return [(name, unit, values[::step], vary) for name, unit, values, vary in every]


def _probes(case: TrinityCase, value: float) -> TrinityCase:
    return _with_probing(case, every=round(1_000 / value) if value else 0)


def _lookahead(case: TrinityCase, value: float) -> TrinityCase:
    return _with_probing(case, lookahead=int(value))


def _with_probing(case: TrinityCase, **changes: int) -> TrinityCase:
    probing = replace(case.traffic.probing, **changes)
    return replace(case, traffic=replace(case.traffic, probing=probing))


def _rows(case: TrinityCase, value: float) -> TrinityCase:
    return _with_index(case, rows=value * 1e6)


def _effort(case: TrinityCase, value: float) -> TrinityCase:
    index = case.search.index
    return _with_index(case, top_m=int(index.top_m * value), width=int(index.width * value))


def _with_index(case: TrinityCase, **changes: float) -> TrinityCase:
    index: IndexSpec = replace(case.search.index, **changes)  # type: ignore[arg-type]  # by name
    return replace(case, search=replace(case.search, index=index))


def _updates(case: TrinityCase, value: float) -> TrinityCase:
    return replace(case, traffic=replace(case.traffic, updates_per_s=value))


def _hop(case: TrinityCase, value: float) -> TrinityCase:
    return replace(case, hop_ms=value)


def _degree(case: TrinityCase, value: float) -> TrinityCase:
    return replace(case, degree=int(value), gpus=max(case.gpus, 4 * int(value)))


def _displaced(case: TrinityCase, value: float) -> TrinityCase:
    setup = replace(case.setup, model=QWEN_30B)
    return replace(case, setup=setup, degree=8, gpus=32, spread="experts", displaced=value)


def capacity(case: TrinityCase) -> float:
    """Return the most requests/s that (c) serves."""
    case = replace(case, kind=POOL)
    per_s = 1.0
    for _ in range(3):  # the search pool grows with the rate
        case = replace(case, traffic=replace(case.traffic, per_s=per_s))
        per_s = case.layout().per_s
    return per_s


class CachedRunner:
    """Runs each case only once and caches its result."""

    def __init__(self, pool: Runner) -> None:
        self._pool = pool
        self._results: dict[TrinityCase, TrinityResult] = {}

    def results_of(self, name: str, cases: Sequence[TrinityCase]) -> list[TrinityResult]:
        """Return the results of the cases, in their order."""
        same = [_without_hop(case) for case in cases]
        new = [case for case in dict.fromkeys(same) if case not in self._results]
        results = self._pool.map(name, rag_cluster.run, new)
        self._results.update(zip(new, results, strict=True))
        return [self._results[case] for case in same]


def _without_hop(case: TrinityCase) -> TrinityCase:
    """Return the case without a hop time if its searches all stay in their own nodes."""
    return replace(case, hop_ms=0.0) if case.kind.beside == "all" else case


def study(
    pool: Runner, case: TrinityCase, *, quick: bool, kinds: Sequence[PlacementKind] = KINDS
) -> list[Sweep]:
    """Vary the load first, then each parameter."""
    runs = CachedRunner(pool)
    loads = LOADS[1::2] if quick else LOADS
    sweeps = [_sweep(runs, "load", "of what (c) serves", [(x, case, x) for x in loads], kinds)]
    for name, unit, values, vary in variations(quick=quick):
        cases = [(value, vary(case, value), LOAD) for value in values]
        sweeps.append(_sweep(runs, name, unit, cases, kinds))
    return sweeps


def _sweep(
    runs: CachedRunner,
    name: str,
    unit: str,
    cases: Sequence[tuple[float, TrinityCase, float]],
    kinds: Sequence[PlacementKind],
) -> Sweep:
    kind_cases: list[TrinityCase] = []
    points: list[SweepPoint] = []
    for value, case, load in cases:
        point, per_s = _point(value, case, load)
        points.append(point)
        if not per_s:
            continue
        for kind in kinds:
            kind_case = replace(case, kind=kind, traffic=replace(case.traffic, per_s=per_s))
            try:
                kind_case.layout()
                kind_cases.append(kind_case)
            except ConfigError as error:
                point.impossible[kind.name] = error.message
    results = iter(runs.results_of(name, kind_cases))
    for point in points:
        names = [kind.name for kind in kinds if kind.name not in point.impossible]
        names = names if point.per_s else []
        point.results.update((placement, next(results)) for placement in names)
    return Sweep(name=name, unit=unit, points=points, even=break_evens(points))


def _point(value: float, case: TrinityCase, load: float) -> tuple[SweepPoint, float]:
    """Return a point without results, with its load; the load is 0 if (c) is impossible."""
    try:
        per_s, impossible = load * capacity(case), {}
    except ConfigError as error:
        per_s, impossible = 0.0, {POOL.name: error.message}
    return SweepPoint(value=value, per_s=per_s, results={}, impossible=impossible), per_s


def break_evens(points: Sequence[SweepPoint]) -> list[BreakEven]:
    """Return the break-even of (c) with each other placement, by each metric."""
    rivals = {name for point in points for name in point.results if name != POOL.name}
    return [_break_even(points, metric, rival) for metric in METRICS for rival in sorted(rivals)]


def _break_even(points: Sequence[SweepPoint], metric: PlacementMetric, rival: str) -> BreakEven:
    marks = [
        (point.value, _lead(point, metric, rival))
        for point in points
        if {rival, POOL.name} <= point.results.keys()
    ]
    signs = {_sign(lead) for _, lead in marks} - {0}
    if len(signs) < 2:
        return BreakEven(metric=metric.name, rival=rival, at=None, says=_throughout(signs, rival))
    at, first = _crossing(marks)
    says = f"(c) is better {'below' if first > 0 else 'above'} {at:.3g}, {rival} on the other side"
    if _changes(marks) > 1:
        says += ", until they change places again"
    return BreakEven(metric=metric.name, rival=rival, at=at, says=says)


def _lead(point: SweepPoint, metric: PlacementMetric, rival: str) -> float:
    """Return by what share (c) is better than the rival."""
    pool_figure = getattr(point.results[POOL.name], metric.field)
    rival_figure = getattr(point.results[rival], metric.field)
    if max(pool_figure, rival_figure) == 0:
        return 0.0
    lead: float = (pool_figure - rival_figure) / max(pool_figure, rival_figure)
    return lead if metric.more_is_better else -lead


def _sign(lead: float) -> int:
    return 0 if abs(lead) < EQUAL else 1 if lead > 0 else -1


def _changes(marks: Sequence[tuple[float, float]]) -> int:
    """Return how often the lead changes its sign."""
    signs = [_sign(lead) for _, lead in marks if _sign(lead)]
    return sum(sign != next_sign for sign, next_sign in pairwise(signs))


def _throughout(signs: set[int], rival: str) -> str:
    if not signs:
        return "equal within 1 %"
    better = "(c)" if 1 in signs else rival
    return f"{better} is as good or better throughout"


def _crossing(marks: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Return where the lead first changes its sign, interpolated; and its sign before."""
    before = next((value, lead) for value, lead in marks if _sign(lead))
    for value, lead in marks:
        if _sign(lead) == _sign(before[1]):
            before = value, lead
        elif _sign(lead):
            share = before[1] / (before[1] - lead)
            return before[0] + share * (value - before[0]), _sign(before[1])
    raise AssertionError("leads of both signs")


def collectives(case: TrinityCase) -> list[Collectives]:
    """Return the collectives of the base case's prompts, by degree of tensor parallelism."""
    rows = []
    for degree in (1, 2, 4, 8):
        node_setup, crossing_setup = parallel(case.setup, degree), parallel(case.setup, degree, 1)
        tokens = case.traffic.computed_tokens
        alone = replace(node_setup, exchange_ms_per_token=0.0, overhead_ms=case.setup.overhead_ms)
        rows.append(
            Collectives(
                degree=degree,
                prompt_ms=prompt_ms(node_setup, tokens),
                collective_ms=prompt_ms(node_setup, tokens) - prompt_ms(alone, tokens),
                crossing_ms=prompt_ms(crossing_setup, tokens) - prompt_ms(alone, tokens),
                saved_ms=2 * (case.hop_ms - LOCAL_MS),
            )
        )
    return rows


def run_study(pool: Runner, case: TrinityCase, *, quick: bool) -> TrinityFindings:
    """Run the whole study and return its findings."""
    began_s = time.monotonic()
    findings = TrinityFindings(seed=case.seed, quick=quick, base=case, per_s=capacity(case))
    findings.curves, findings.collectives = utilisation(case), collectives(case)
    findings.sweeps = study(pool, case, quick=quick)
    findings.seconds = time.monotonic() - began_s
    return findings


def utilisation(case: TrinityCase) -> list[Curve]:
    """Return figure 1 for the case's GPU and model."""
    return curves(case.setup, case.search)
