"""The retrieval benchmark: how documents improve answers, and what searches for them cost.

`make bench-retrieval`, or `trivium bench retrieval --quick`. Part `quality` asks a real model about
a made-up handbook. Part `probes` searches during its answers. Part `early` sends long prompts that
are computed during a search. Part `recall` searches Python's docstrings, beside exact searches.
Part `latency` measures the time to the first token with and without a search, idle and beside a
full decode queue. Part `freshness` measures how soon searches find a document under load, and the
rate of ingestion beside the embedding model alone. Part `kept` edits pages between questions with
cached answers. Part `losses` kills a shard replica and a shard under load. Writes
build/bench/retrieval.json.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult
from infra.bench.results import BENCH_DIR, Bar, nested, table
from infra.bench.retrieval import answers, cached_answers, loads, losses, recall
from infra.bench.retrieval.scene import PARTS, Figures, RetrievalOptions, Scene, scene_on
from infra.bench.stacks import make_stack, model_stack
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from workers.embed.settings import EmbeddingSettings
from workers.models.wheels import MINILM

_ANSWER_TOKENS, _LOOKUP_MS = 16, 2_000
_BUDGET_MS, _DEADLINE_MS = 60_000, 600_000  # long, since only the quality of answers is measured
_PATIENCE_S = 600.0  # for an answer of the real model


@dataclass(frozen=True, slots=True)
class Part:
    """One part: on which stack it runs, what it measures, and what its figures mean."""

    stack: str
    measure: Callable[[Scene], Awaitable[Figures]]
    bars: Callable[[Figures], list[Bar]]
    title: str
    columns: tuple[str, ...] = ()
    rows: Callable[[Figures], Mapping[str, Any]] = dict


def answering_stack() -> Stack:
    """Return a stack with the model that `trivium up` serves, on one replica worker."""
    plan = StackPlan(prefill=0, decode=0, replica=1, retrieval=1, embedding=1)
    folder = BENCH_DIR.absolute() / "retrieval-quality"
    return model_stack(plan, folder, ttft_ms=_BUDGET_MS, deadline_ms=_DEADLINE_MS)


def simulated_stack() -> Stack:
    """Return a stack whose engines use little CPU and end their answers before `max_tokens`, since
    gateways cache only such answers. Lookups in the response cache may take long.
    """
    plan, folder = StackPlan(retrieval=1, embedding=1), BENCH_DIR.absolute() / "retrieval-load"
    stack = make_stack(plan, folder, end_every_tokens=_ANSWER_TOKENS)
    gateway = replace(stack.settings.gateway, cache_wait_ms=_LOOKUP_MS)
    embedding = EmbeddingSettings(model=MINILM)
    stack.settings = replace(stack.settings, embedding=embedding, gateway=gateway)
    return stack


def sharded_stack() -> Stack:
    """Return a stack with two shards, the first with two replicas. No model computes its vectors,
    since only the arrival and the reports of answers are measured.
    """
    plan = StackPlan(retrieval=3, shards=2, embedding=1)
    return make_stack(plan, BENCH_DIR.absolute() / "retrieval-losses")


STACKS = {
    "model": (answering_stack, _PATIENCE_S),
    "load": (simulated_stack, loads.PATIENCE_S),
    "shards": (sharded_stack, loads.PATIENCE_S),
}
_QUALITY = ("right", "right_paraphrased", "page_found", "tokens_put_in")
_LATENCY = ("ttft_ms.with.p50", "ttft_ms.with.p99", "ttft_ms.without.p50", "ttft_ms.without.p99",
            "search_ms.prefill.p99", "search_ms.decode.p99", "late")  # fmt: skip
MEASURED = {
    "quality": Part("model", answers.quality, answers.quality_bars, "Right answers",
                    _QUALITY, nested),
    "probes": Part("model", answers.probes, answers.probe_bars, "Answers with probes"),
    "early": Part("model", answers.early, answers.early_bars, "ms to the first token, long prompts",
                  rows=lambda figures: figures["ms"]),
    "recall": Part("load", recall.measure, recall.bars, "recall@5 of docstrings",
                   rows=lambda figures: figures["recall"]),
    "kept": Part("load", cached_answers.measure, cached_answers.bars, "Answers, ms",
                 rows=cached_answers.rows),
    "latency": Part("load", loads.latency, loads.latency_bars, "Chats with a search",
                    _LATENCY, nested),
    "freshness": Part("load", loads.freshness, loads.freshness_bars, "Documents"),
    "losses": Part("shards", losses.measure, losses.bars, "Answers while retrieval workers die"),
}  # fmt: skip


async def run(options: RetrievalOptions, console: Console) -> BenchmarkResult:
    """Run the chosen parts and return their figures, bars and tables."""
    measured = {}
    chosen = {name: part for name, part in MEASURED.items() if name in (options.only or PARTS)}
    for stack, (make, patience_s) in STACKS.items():
        if parts := {name: part for name, part in chosen.items() if part.stack == stack}:
            async with scene_on(make(), options, patience_s) as scene:
                for name, part in parts.items():
                    measured[name] = await part.measure(scene)
    figures = {name: measured[name] for name in PARTS if name in measured}
    return BenchmarkResult(figures=figures, bars=bars(figures), tables=tables(figures))


def bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of all parts that ran."""
    return [bar for name, row in figures.items() for bar in MEASURED[name].bars(row)]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the tables of all parts that ran."""
    parts = [(MEASURED[name], row) for name, row in figures.items()]
    return [table(part.title, part.rows(row), *part.columns) for part, row in parts]


BENCHMARK = Benchmark(
    "retrieval",
    __doc__,
    run,
    full=RetrievalOptions(),
    quick=RetrievalOptions(
        sizes=(30,), questions=4, streams=2, answer_tokens=64, rounds=1, prompts=3, docstrings=150,
        rates=(4.0, 20.0), load_s=1.5, fillers=4_000, documents=200, turns=30, pairs=100,
        kill_rate=4.0, kill_s=3.0,
    ),
    quick_help="a small handbook, few questions, short loads",
)  # fmt: skip
