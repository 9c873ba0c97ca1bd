"""The comparison: loads, then one parameter at a time, and where another placement becomes better.

Every placement has the same GPUs, index and requests. Of each varied parameter the load is a share
of what the pool placement (c) can do there, so that none is compared where all are idle or lost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from infra.evaluate.points.runs import Runner
from infra.evaluate.trinity import served
from infra.evaluate.trinity.hardware import Index, SearchCosts, parallel
from infra.evaluate.trinity.placements import KINDS, LOCAL_MS, POOL, Kind
from infra.evaluate.trinity.pools import Traffic, prompt_ms
from infra.evaluate.trinity.probing import Probing
from infra.evaluate.trinity.roofline import Curve, curves
from infra.evaluate.trinity.served import Case, Result
from infra.simulator.machine.latency import QWEN_30B, Setup
from schemas.errors import ConfigError

LOADS = (0.4, 0.7, 0.9, 1.1)  # of what (c) can do
LOAD = 0.8
EQUAL = 0.01  # figures that differ by less are called equal


@dataclass(frozen=True, slots=True)
class Metric:
    """What placements are compared by."""

    name: str
    field: str
    more_is_better: bool = False


METRICS = (
    Metric("TTFT p50", "ttft_p50"),
    Metric("TTFT p99", "ttft_p99"),
    Metric("TPOT p50", "tpot_p50"),
    Metric("tokens/s", "tokens_per_s", more_is_better=True),
    Metric("within targets", "good_share", more_is_better=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of what is varied: a result for each placement, or why there is none."""

    value: float
    per_s: float
    results: dict[str, Result]
    impossible: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where (c) begins or ends to be better than another placement."""

    metric: str
    other: str
    at: float | None  # None: nowhere in the range
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One parameter varied."""

    name: str
    unit: str
    points: list[Point]
    even: list[BreakEven] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """What a prompt's collectives take, beside what a search saves by being near."""

    degree: int
    prompt_ms: float
    collective_ms: float
    crossing_ms: float  # with one GPU of the worker on another node
    saved_ms: float


@dataclass(slots=True, kw_only=True)
class Findings:
    """Everything that was found; times in ms."""

    seed: int
    quick: bool
    base: Case
    per_s: float  # requests that (c) serves at most
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
) -> Case:
    """The case that the others are varied from: chats of 1 000 + 1 024 tokens, 256 answered."""
    traffic = Traffic(
        per_s=1.0,
        prompt_tokens=1_000,
        answer_tokens=256,
        probing=Probing(every=every),
        updates_per_s=100.0,
    )
    return Case(
        kind=POOL,
        traffic=traffic,
        setup=setup or Setup(),
        search=search or SearchCosts(),
        gpus=gpus,
        hop_ms=hop_ms,
        seed=seed,
        duration_ms=duration_ms,
    )


Varied = tuple[str, str, Sequence[float], Callable[[Case, float], Case]]


def varied(*, quick: bool) -> list[Varied]:
    """What is varied one at a time; fewer values with `quick`."""
    every: list[Varied] = [
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


def _probes(case: Case, value: float) -> Case:
    return _probed(case, every=round(1_000 / value) if value else 0)


def _lookahead(case: Case, value: float) -> Case:
    return _probed(case, lookahead=int(value))


def _probed(case: Case, **changes: int) -> Case:
    probing = replace(case.traffic.probing, **changes)
    return replace(case, traffic=replace(case.traffic, probing=probing))


def _rows(case: Case, value: float) -> Case:
    return _indexed(case, rows=value * 1e6)


def _effort(case: Case, value: float) -> Case:
    index = case.search.index
    return _indexed(case, top_m=int(index.top_m * value), width=int(index.width * value))


def _indexed(case: Case, **changes: float) -> Case:
    index: Index = replace(case.search.index, **changes)  # type: ignore[arg-type]  # by name
    return replace(case, search=replace(case.search, index=index))


def _updates(case: Case, value: float) -> Case:
    return replace(case, traffic=replace(case.traffic, updates_per_s=value))


def _hop(case: Case, value: float) -> Case:
    return replace(case, hop_ms=value)


def _degree(case: Case, value: float) -> Case:
    return replace(case, degree=int(value), gpus=max(case.gpus, 4 * int(value)))


def _displaced(case: Case, value: float) -> Case:
    setup = replace(case.setup, model=QWEN_30B)
    return replace(case, setup=setup, degree=8, gpus=32, spread="experts", displaced=value)


def capacity(case: Case) -> float:
    """Requests/s that (c) serves at most."""
    case = replace(case, kind=POOL)
    per_s = 1.0
    for _ in range(3):  # the pool grows with what it is asked
        case = replace(case, traffic=replace(case.traffic, per_s=per_s))
        per_s = case.layout().per_s
    return per_s


class Runs:
    """Runs cases once each, however often they are asked for."""

    def __init__(self, pool: Runner) -> None:
        self._pool = pool
        self._known: dict[Case, Result] = {}

    def of(self, name: str, cases: Sequence[Case]) -> list[Result]:
        """The results, in order."""
        same = [_without_hop(case) for case in cases]
        new = [case for case in dict.fromkeys(same) if case not in self._known]
        found = self._pool.map(name, served.run, new)
        self._known.update(zip(new, found, strict=True))
        return [self._known[case] for case in same]


def _without_hop(case: Case) -> Case:
    """Who searches in its own node only does not care how far others are."""
    return replace(case, hop_ms=0.0) if case.kind.beside == "all" else case


def study(pool: Runner, case: Case, *, quick: bool, kinds: Sequence[Kind] = KINDS) -> list[Sweep]:
    """The load first, then each parameter."""
    runs = Runs(pool)
    loads = LOADS[1::2] if quick else LOADS
    sweeps = [_sweep(runs, "load", "of what (c) serves", [(x, case, x) for x in loads], kinds)]
    for name, unit, values, vary in varied(quick=quick):
        cases = [(value, vary(case, value), LOAD) for value in values]
        sweeps.append(_sweep(runs, name, unit, cases, kinds))
    return sweeps


def _sweep(
    runs: Runs,
    name: str,
    unit: str,
    cases: Sequence[tuple[float, Case, float]],
    kinds: Sequence[Kind],
) -> Sweep:
    wanted: list[Case] = []
    points: list[Point] = []
    for value, case, load in cases:
        point, per_s = _point(value, case, load)
        points.append(point)
        if not per_s:
            continue
        for kind in kinds:
            each = replace(case, kind=kind, traffic=replace(case.traffic, per_s=per_s))
            try:
                each.layout()
                wanted.append(each)
            except ConfigError as error:
                point.impossible[kind.name] = error.message
    found = iter(runs.of(name, wanted))
    for point in points:
        names = [kind.name for kind in kinds if kind.name not in point.impossible]
        names = names if point.per_s else []
        point.results.update((placement, next(found)) for placement in names)
    return Sweep(name=name, unit=unit, points=points, even=break_evens(points))


def _point(value: float, case: Case, load: float) -> tuple[Point, float]:
    """A point without results, at its load; the load is 0 where (c) cannot be."""
    try:
        per_s, not_there = load * capacity(case), {}
    except ConfigError as error:
        per_s, not_there = 0.0, {POOL.name: error.message}
    return Point(value=value, per_s=per_s, results={}, impossible=not_there), per_s


def break_evens(points: Sequence[Point]) -> list[BreakEven]:
    """By each metric and against each other placement, where (c) and it change places."""
    others = {name for point in points for name in point.results if name != POOL.name}
    return [_break_even(points, metric, other) for metric in METRICS for other in sorted(others)]


def _break_even(points: Sequence[Point], metric: Metric, other: str) -> BreakEven:
    marks = [
        (point.value, _lead(point, metric, other))
        for point in points
        if {other, POOL.name} <= point.results.keys()
    ]
    signs = {_sign(lead) for _, lead in marks} - {0}
    if len(signs) < 2:
        return BreakEven(metric=metric.name, other=other, at=None, says=_throughout(signs, other))
    at, first = _crossing(marks)
    says = f"(c) is better {'below' if first > 0 else 'above'} {at:.3g}, {other} on the other side"
    if _changes(marks) > 1:
        says += ", until they change places again"
    return BreakEven(metric=metric.name, other=other, at=at, says=says)


def _lead(point: Point, metric: Metric, other: str) -> float:
    """By what share (c) is better than the other."""
    ours = getattr(point.results[POOL.name], metric.field)
    theirs = getattr(point.results[other], metric.field)
    if max(ours, theirs) == 0:
        return 0.0
    lead: float = (ours - theirs) / max(ours, theirs)
    return lead if metric.more_is_better else -lead


def _sign(lead: float) -> int:
    return 0 if abs(lead) < EQUAL else 1 if lead > 0 else -1


def _changes(marks: Sequence[tuple[float, float]]) -> int:
    """How often the lead changes its sign."""
    signs = [_sign(lead) for _, lead in marks if _sign(lead)]
    return sum(one != other for one, other in pairwise(signs))


def _throughout(signs: set[int], other: str) -> str:
    if not signs:
        return "equal within 1 %"
    better = "(c)" if 1 in signs else other
    return f"{better} is as good or better throughout"


def _crossing(marks: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Where the lead first changes its sign, between two values; and its sign before."""
    before = next((value, lead) for value, lead in marks if _sign(lead))
    for value, lead in marks:
        if _sign(lead) == _sign(before[1]):
            before = value, lead
        elif _sign(lead):
            share = before[1] / (before[1] - lead)
            return before[0] + share * (value - before[0]), _sign(before[1])
    raise AssertionError("leads of both signs")


def collectives(case: Case) -> list[Collectives]:
    """By degree of tensor parallelism, of the base case's prompts."""
    rows = []
    for degree in (1, 2, 4, 8):
        near, far = parallel(case.setup, degree), parallel(case.setup, degree, 1)
        tokens = case.traffic.computed_tokens
        alone = replace(near, exchange_ms_per_token=0.0, overhead_ms=case.setup.overhead_ms)
        rows.append(
            Collectives(
                degree=degree,
                prompt_ms=prompt_ms(near, tokens),
                collective_ms=prompt_ms(near, tokens) - prompt_ms(alone, tokens),
                crossing_ms=prompt_ms(far, tokens) - prompt_ms(alone, tokens),
                saved_ms=2 * (case.hop_ms - LOCAL_MS),
            )
        )
    return rows


def found(pool: Runner, case: Case, *, quick: bool) -> Findings:
    """Everything."""
    began_s = time.monotonic()
    findings = Findings(seed=case.seed, quick=quick, base=case, per_s=capacity(case))
    findings.curves, findings.collectives = utilisation(case), collectives(case)
    findings.sweeps = study(pool, case, quick=quick)
    findings.seconds = time.monotonic() - began_s
    return findings


def utilisation(case: Case) -> list[Curve]:
    """Figure 1 for the case's GPU and model."""
    return curves(case.setup, case.search)
