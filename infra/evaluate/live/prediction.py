"""How good a prediction is: one live run recorded, others predicted from it, then held live.

`trivium evaluate prediction` holds conversations on one stack of simulated engines, behind routers
of other settings, one after the other. From the recording of the first it predicts each of the
others (`infra/prediction`), and says by how much it was wrong. The first way is predicted too, and
held once more: the difference of those two runs is what no prediction could know. All of it is done
in several rounds, so that what else the machine does meets each way alike; figures are of all
rounds together.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from infra.bench.results import BENCH_DIR, Bar, command_line, write_report
from infra.evaluate.live.comparison import Deployment, Way, machine, switch
from infra.evaluate.live.conversations import LiveLoad, hold
from infra.prediction.figures import METRICS, errors, figures
from infra.prediction.predicting import predict
from infra.prediction.speeds import Speeds, measured, shown
from infra.prediction.traffic import Traffic, read
from infra.replay.collecting import record
from infra.replay.redeciding import changed
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.log.clock import wall_ms
from schemas.records import Outcome

AIMS = {"p50": 0.15, "p99": 0.25}  # of TTFT and of the whole answer
_AIMED = ("ttft_ms", "e2e_ms")
_WARM = 40  # conversations, before anything is measured
_LEAD_MS = 20  # a warm conversation's last record is before the span
RECORDED = Way(name="static, x=0.5", local_share=0.5)
PREDICTED = (
    Way(name="static, x=0"),
    Way(name="static, x=1", local_share=1.0),
    Way(name="conditional", policy="conditional"),
    Way(name="learned", policy="learned", orchestration="auto"),
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
DEPLOYMENT = Deployment(name="predicted", ways=_WAYS, engine=ENGINE)
PLAN = StackPlan(prefill=1, decode=2, broker=False)


def load_of(seconds: float, per_s: float, seed: int) -> LiveLoad:
    """Conversations of three turns that begin as a Poisson process, whatever is under way."""
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
class Compared:
    """One way, as it was predicted and as it was."""

    way: str
    predicted: list[Outcome] = field(default_factory=list)
    live: list[Outcome] = field(default_factory=list)

    @property
    def figures(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the prediction, and of what was."""
        return figures(self.predicted), figures(self.live)

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Per metric and percentile."""
        return errors(*self.figures)


@dataclass(slots=True)
class Found:
    """All of a run."""

    load: LiveLoad
    rounds: int
    speeds: list[Speeds] = field(default_factory=list)  # of each round
    ways: list[Compared] = field(default_factory=lambda: [Compared(w.name) for w in _WAYS])
    # the first way once more, "predicted" by the first time
    again: Compared = field(default_factory=lambda: Compared(f"{RECORDED.name}, again"))
    predicting_s: float = 0.0
    recorded_s: float = 0.0


async def run(load: LiveLoad, rounds: int, told: Callable[[str], None]) -> Found:
    """Record, predict, hold live; `told` hears what is being done."""
    found, folder = Found(load, rounds), BENCH_DIR.absolute() / "prediction"
    with machine("sim", folder) as made:
        async with made(DEPLOYMENT, PLAN) as stack:
            told("warming up")
            await hold(stack, replace(load, conversations=_WARM), "warm up", RECORDED.name)
            for number in range(rounds):
                told(f"round {number + 1} of {rounds}")
                of_round = replace(load, seed=load.seed + number)
                await _round(stack, of_round, f"{folder}/{number}", found)
    return found


async def _round(stack: Stack, load: LiveLoad, prefix: str, found: Found) -> None:
    """All runs of a round, whose files begin with `prefix`; each round begins with another way."""
    runs = {"recorded": RECORDED, **{way.name: way for way in PREDICTED}, "again": RECORDED}
    order, first = list(runs), load.seed % len(runs)
    held: dict[str, Traffic] = {}
    for name in order[first:] + order[:first]:
        path = Path(f"{prefix}-{order.index(name)}.avro")
        held[name] = await _held(stack, runs[name], load, path)
    traffic = held["recorded"]
    speeds = measured(traffic)
    found.speeds.append(speeds)
    begun_s = time.perf_counter()
    for way, compared in zip(_WAYS, found.ways, strict=True):
        compared.predicted += _predicted(traffic, speeds, way)
        compared.live += held["recorded" if way is RECORDED else way.name].outcomes.values()
    found.predicting_s += time.perf_counter() - begun_s
    found.again.predicted += traffic.outcomes.values()
    found.again.live += held["again"].outcomes.values()
    arrived = [each.arrived_ms for each in traffic.requests.values()]
    found.recorded_s += (max(arrived) - min(arrived)) / 1000


async def _held(stack: Stack, way: Way, load: LiveLoad, path: Path) -> Traffic:
    """The conversations in this way, from the log."""
    await switch(stack, way)
    name = path.stem
    warm = LiveLoad(conversations=1, turns=2)
    await hold(stack, warm, f"warm {name}", way.name)
    since_ms = wall_ms() + _LEAD_MS
    await hold(stack, load, name, way.name)  # other words each time: nothing of them is cached
    look_back_ms = 2 * stack.settings.router.snapshot_ms
    await record(stack.settings.log, path, since_ms, wall_ms(), look_back_ms=look_back_ms)
    return read(path)


def _predicted(traffic: Traffic, speeds: Speeds, way: Way) -> Iterable[Outcome]:
    given = {
        "policy": way.policy,
        "local_share": str(way.local_share),
        "orchestration": way.orchestration,
    }
    return predict(traffic, speeds, changed(traffic.settings, given)).outcomes.values()


def bars(found: Found) -> list[Bar]:
    """The errors that have an aim, of the ways that were not recorded."""
    rows = []
    for each in found.ways[1:]:
        for metric in _AIMED:
            for percent, most in AIMS.items():
                error = each.errors[metric].get(percent)
                rows.append(
                    Bar(
                        name=f"{each.way}: {metric.removesuffix('_ms')} {percent}",
                        value=None if error is None else 100 * error,
                        unit="%",
                        target=f"within {most:.0%}",
                        met=error is not None and abs(error) <= most,
                    )
                )
    return rows


def table(found: Found) -> Table:
    """Live, and the error of the prediction in brackets."""
    columns = [f"{name.removesuffix('_ms')} {p}" for name in METRICS for p in ("p50", "p90", "p99")]
    shown_ = Table("way", "local", "KV", *columns, title="live, ms (error of the prediction)")
    for each in (*found.ways, found.again):
        predicted, live = each.figures
        cells = [
            f"{live[metric][percent]:.4g} ({error:+.0%})"
            for metric, row in each.errors.items()
            for percent, error in row.items()
        ]
        local = f"{live['local_share']:.0%} ({predicted['local_share']:.0%})"
        kv = f"{live['kv_bytes'] / 1e6:.0f} ({predicted['kv_bytes'] / 1e6:.0f}) MB"
        shown_.add_row(each.way, local, kv, *cells)
    return shown_


def write(found: Found, folder: Path = BENCH_DIR) -> Path:
    """prediction.json; its path."""
    ways = {}
    for each in (*found.ways, found.again):
        predicted, live = each.figures
        ways[each.way] = {"live": live, "predicted": predicted, "errors": each.errors}
    return write_report(
        "prediction",
        command=command_line(),
        seed=found.load.seed,
        load={
            **asdict(found.load),
            "engine": ENGINE,
            "recorded": RECORDED.name,
            "rounds": found.rounds,
        },
        figures={
            "ways": ways,
            "speeds": [shown(each) for each in found.speeds],
            "predicting_s": found.predicting_s,
            "recorded_s": found.recorded_s,
        },
        bars=bars(found),
        folder=folder,
    )
