"""How good a prediction is: one live run is recorded, others are predicted from it and then run.

`trivium evaluate prediction` runs conversations on one stack of simulated engines, behind routers
with different settings, one after the other. From the recording of the first variant it predicts
each of the others (`infra/replay/simulation`), and reports the errors. The first variant is
predicted too, and run once more: no prediction could know the difference of those two runs. All of
this runs in several rounds, so that other load of the machine affects each variant alike; figures
are of all rounds together.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from infra.bench.results import BENCH_DIR, Bar, command_line, write_report
from infra.planning.live_conversations import LiveLoad, hold
from infra.planning.live_stack import Deployment, RoutingVariant, machine, switch
from infra.replay.collecting import record
from infra.replay.redeciding import with_overrides
from infra.replay.simulation.deployment import SimulatedDeployment, recorded_deployment
from infra.replay.simulation.figures import METRICS, errors, figures
from infra.replay.simulation.run import simulate
from infra.replay.simulation.speeds import MeasuredSpeeds, summarize
from infra.replay.simulation.traffic import RecordedTraffic, read
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.records import Outcome
from streams.log.clock import wall_ms

AIMS = {"p50": 0.15, "p99": 0.25}  # largest relative errors of TTFT and of the whole answer
_AIMED = ("ttft_ms", "e2e_ms")
_WARM = 40  # conversations before any measurement
_LEAD_MS = 20  # so that the last record of the warm-up is before the span
RECORDED = RoutingVariant(name="static, x=0.5", local_share=0.5)
PREDICTED = (
    RoutingVariant(name="static, x=0"),
    RoutingVariant(name="static, x=1", local_share=1.0),
    RoutingVariant(name="conditional", policy="conditional"),
    RoutingVariant(name="learned", policy="learned", orchestration="auto"),
)
ENGINE: dict[str, Any] = {
    "prefill_base_ms": 20.0,
    "prefill_ms_per_token": 0.25,
    "append_base_ms": 10.0,
    "append_ms_per_token": 0.25,
    "prefill_interference": 0.3,
    "decode_step_ms": 15.0,
    "decode_ms_per_request": 0.3,
    "end_every_tokens": 0,
}
_WAYS = (RECORDED, *PREDICTED)
DEPLOYMENT = Deployment(name="predicted", variants=_WAYS, engine=ENGINE)
PLAN = StackPlan(prefill=1, decode=2, broker=False)


def load_of(seconds: float, per_s: float, seed: int) -> LiveLoad:
    """Return conversations of three turns that begin as a Poisson process, at any concurrency."""
    return LiveLoad(
        conversations=max(1, round(seconds * per_s)),
        turns=3,
        streams=10_000,
        per_s=per_s,
        first_words=200,
        first_tokens=64,
        words=40,
        tokens=48,
        seed=seed,
    )


@dataclass(slots=True)
class VariantComparison:
    """The predicted and the live outcomes of one variant."""

    variant: str
    predicted: list[Outcome] = field(default_factory=list)
    live: list[Outcome] = field(default_factory=list)

    @property
    def figures(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the figures of the prediction and those of the live run."""
        return figures(self.predicted), figures(self.live)

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Return the prediction's errors by metric and percentile."""
        return errors(*self.figures)


@dataclass(slots=True)
class PredictionResults:
    """All measurements and comparisons of one run."""

    load: LiveLoad
    rounds: int
    speeds: list[MeasuredSpeeds] = field(default_factory=list)  # one per round
    comparisons: list[VariantComparison] = field(
        default_factory=lambda: [VariantComparison(w.name) for w in _WAYS]
    )
    # the first variant once more, "predicted" by its first run
    repeat: VariantComparison = field(
        default_factory=lambda: VariantComparison(f"{RECORDED.name}, again")
    )
    predicting_s: float = 0.0
    recorded_s: float = 0.0


async def run(load: LiveLoad, rounds: int, report: Callable[[str], None]) -> PredictionResults:
    """Record, predict and run live; `report` gets each step in words."""
    results, folder = PredictionResults(load, rounds), BENCH_DIR.absolute() / "prediction"
    with machine("sim", folder) as build:
        async with build(DEPLOYMENT, PLAN) as stack:
            report("warming up")
            await hold(stack, replace(load, conversations=_WARM), "warm up", RECORDED.name)
            for number in range(rounds):
                report(f"round {number + 1} of {rounds}")
                round_load = replace(load, seed=load.seed + number)
                await _round(stack, round_load, f"{folder}/{number}", results)
    return results


async def _round(stack: Stack, load: LiveLoad, prefix: str, results: PredictionResults) -> None:
    """Run one round, whose files begin with `prefix`; each round begins with another variant."""
    runs = {
        "recorded": RECORDED,
        **{variant.name: variant for variant in PREDICTED},
        "again": RECORDED,
    }
    order, first = list(runs), load.seed % len(runs)
    traffic_by_run: dict[str, RecordedTraffic] = {}
    for name in order[first:] + order[:first]:
        path = Path(f"{prefix}-{order.index(name)}.avro")
        traffic_by_run[name] = await _run_live(stack, runs[name], load, path)
    traffic = traffic_by_run["recorded"]
    deployment = recorded_deployment(traffic)
    assert deployment.speeds is not None, "those of a recording are measured"
    results.speeds.append(deployment.speeds)
    began_s = time.perf_counter()
    for variant, compared in zip(_WAYS, results.comparisons, strict=True):
        compared.predicted += _predict_outcomes(traffic, deployment, variant)
        compared.live += traffic_by_run[
            "recorded" if variant is RECORDED else variant.name
        ].outcomes.values()
    results.predicting_s += time.perf_counter() - began_s
    results.repeat.predicted += traffic.outcomes.values()
    results.repeat.live += traffic_by_run["again"].outcomes.values()
    arrived = [request.arrived_ms for request in traffic.requests.values()]
    results.recorded_s += (max(arrived) - min(arrived)) / 1000


async def _run_live(
    stack: Stack, variant: RoutingVariant, load: LiveLoad, path: Path
) -> RecordedTraffic:
    """Run the conversations live with this variant, and read their traffic from the log."""
    await switch(stack, variant)
    name = path.stem
    warm = LiveLoad(conversations=1, turns=2)
    await hold(stack, warm, f"warm {name}", variant.name)
    since_ms = wall_ms() + _LEAD_MS
    await hold(stack, load, name, variant.name)  # other words each time: no cached prefix
    look_back_ms = 2 * stack.settings.router.snapshot_ms
    await record(stack.settings.log, path, since_ms, wall_ms(), look_back_ms=look_back_ms)
    return read(path)


def _predict_outcomes(
    traffic: RecordedTraffic, deployment: SimulatedDeployment, variant: RoutingVariant
) -> Iterable[Outcome]:
    router_settings = {
        "policy": variant.policy,
        "local_share": str(variant.local_share),
        "orchestration": variant.orchestration,
    }
    settings = with_overrides(deployment.settings, router_settings)
    return simulate(replace(deployment, settings=settings), traffic).outcomes.values()


def bars(results: PredictionResults) -> list[Bar]:
    """Return the bars of the errors that have an aim, for the variants that were not recorded."""
    rows = []
    for comparison in results.comparisons[1:]:
        for metric in _AIMED:
            for percent, tolerance in AIMS.items():
                error = comparison.errors[metric].get(percent)
                rows.append(
                    Bar(
                        name=f"{comparison.variant}: {metric.removesuffix('_ms')} {percent}",
                        value=None if error is None else 100 * error,
                        unit="%",
                        target=f"within {tolerance:.0%}",
                        met=error is not None and abs(error) <= tolerance,
                    )
                )
    return rows


def table(results: PredictionResults) -> Table:
    """Return a table of live figures, with the prediction's error in brackets."""
    columns = [f"{name.removesuffix('_ms')} {p}" for name in METRICS for p in ("p50", "p90", "p99")]
    rich_table = Table("way", "local", "KV", *columns, title="live, ms (error of the prediction)")
    for comparison in (*results.comparisons, results.repeat):
        predicted, live = comparison.figures
        cells = [
            f"{live[metric][percent]:.4g} ({error:+.0%})"
            for metric, row in comparison.errors.items()
            for percent, error in row.items()
        ]
        local = f"{live['local_share']:.0%} ({predicted['local_share']:.0%})"
        kv = f"{live['kv_bytes'] / 1e6:.0f} ({predicted['kv_bytes'] / 1e6:.0f}) MB"
        rich_table.add_row(comparison.variant, local, kv, *cells)
    return rich_table


def write(results: PredictionResults, folder: Path = BENCH_DIR) -> Path:
    """Write prediction.json and return its path."""
    rows = {}
    for comparison in (*results.comparisons, results.repeat):
        predicted, live = comparison.figures
        rows[comparison.variant] = {
            "live": live,
            "predicted": predicted,
            "errors": comparison.errors,
        }
    return write_report(
        "prediction",
        command=command_line(),
        seed=results.load.seed,
        load={
            **asdict(results.load),
            "engine": ENGINE,
            "recorded": RECORDED.name,
            "rounds": results.rounds,
        },
        figures={
            "ways": rows,
            "speeds": [summarize(speeds) for speeds in results.speeds],
            "predicting_s": results.predicting_s,
            "recorded_s": results.recorded_s,
        },
        bars=bars(results),
        folder=folder,
    )
