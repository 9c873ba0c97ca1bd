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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.results import Bar, at_least
from infra.bench.retrieval import (
    cached_answers,
    early_prefill,
    freshness,
    latency,
    losses,
    probes,
    quality,
    recall,
)
from infra.bench.retrieval.stacks import answering_stack, running, sharded_stack, simulated_stack
from infra.handbook.library import library

QUALITY, PROBES, EARLY = "quality", "probes", "early"
RECALL, LATENCY, FRESHNESS, KEPT = "recall", "latency", "freshness", "kept"
LOSSES = "losses"
PARTS = (QUALITY, PROBES, EARLY, RECALL, LATENCY, FRESHNESS, KEPT, LOSSES)
_PATIENCE_S = 600.0  # for an answer
_MEASURED: Mapping[str, Any] = {
    PROBES: probes, EARLY: early_prefill, RECALL: recall, LATENCY: latency, FRESHNESS: freshness,
    KEPT: cached_answers, LOSSES: losses,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions:
    """Sets which parts run and how much each asks."""

    only: tuple[str, ...] = option((), "these parts", choices=PARTS)
    sizes: tuple[int, ...] = option((30, 300, 3_000), "pages of the handbooks")
    questions: int = option(300, "held out, of the smallest handbook")
    streams: int = option(4, "questions at once")
    answer_tokens: int = option(256, "of each answer with probes")
    rounds: int = option(5, "of answers with probes in each way")
    prompts: int = option(20, "long ones, that are computed during a search")
    docstrings: int = option(0, "documents that are searched; 0: all")
    rates: tuple[float, ...] = option((1.0, 100.0), "chats a second")
    load_s: float = option(60.0, "s of each load")
    fillers: int = option(20_000, "vectors that searches of the decode queue walk over")
    documents: int = option(10_000, "that are ingested at once")
    turns: int = option(1_000, "edits and questions")
    pairs: int = option(4_000, "of questions, of each kind")
    kill_rate: float = option(5.0, "chats a second while workers are killed")
    kill_s: float = option(30.0, "s before and after each kill")
    seed: int = option(1)


QUICK = RetrievalOptions(
    sizes=(30,), questions=4, streams=2, answer_tokens=64, rounds=1, prompts=3, docstrings=150,
    rates=(4.0, 20.0), load_s=1.5, fillers=4_000, documents=200, turns=30, pairs=100,
    kill_rate=4.0, kill_s=3.0,
)  # fmt: skip


async def run(options: RetrievalOptions, console: Console) -> BenchmarkResult:
    """Run the chosen parts and return their figures, bars and tables."""
    figures: dict[str, Any] = {}
    parts = options.only or PARTS
    with counting(console, 34) as progress:
        if {QUALITY, PROBES, EARLY} & set(parts):
            figures |= await _answers(options, parts, progress)
        if {RECALL, LATENCY, FRESHNESS, KEPT} & set(parts):
            figures |= await _loads(options, parts, progress)
        if LOSSES in parts:
            figures[LOSSES] = await _losses(options, progress)
    return BenchmarkResult(figures=figures, bars=bars(figures), tables=tables(figures))


async def _answers(
    options: RetrievalOptions, parts: tuple[str, ...], progress: Progress
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with (
        running(answering_stack("retrieval-quality")) as stack,
        library(stack.settings.log) as books,
    ):
        url, model = stack.gateway_urls[0], stack.settings.model.served_name
        async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
            if QUALITY in parts:
                asker = quality.Questioner(client, model, options.streams, progress)
                figures[QUALITY] = await quality.measure(
                    books, asker, options.sizes, options.questions, options.seed
                )
            if PROBES in parts:
                figures[PROBES] = await probes.measure(
                    books, client, model, streams=options.streams, tokens=options.answer_tokens,
                    rounds=options.rounds, seed=options.seed, progress=progress,
                )  # fmt: skip
            if EARLY in parts:
                figures[EARLY] = await early_prefill.measure(
                    books, client, model, prompts=options.prompts, seed=options.seed,
                    progress=progress,
                )  # fmt: skip
    return figures


async def _losses(options: RetrievalOptions, progress: Progress) -> Mapping[str, Any]:
    async with (
        running(sharded_stack("retrieval-losses")) as stack,
        library(stack.settings.log) as books,
    ):
        return await losses.measure(
            stack, books, options.kill_rate, options.kill_s, options.seed, progress
        )


async def _loads(
    options: RetrievalOptions, parts: tuple[str, ...], progress: Progress
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with (
        running(simulated_stack("retrieval-load")) as stack,
        library(stack.settings.log) as books,
    ):
        if RECALL in parts:
            figures[RECALL] = await recall.measure(
                books, options.docstrings, options.questions, options.seed, progress
            )
        if KEPT in parts:
            figures[KEPT] = await cached_answers.measure(
                stack, books, options.turns, options.pairs, options.seed, progress
            )
        if not {LATENCY, FRESHNESS} & set(parts):
            return figures
        load = latency.ChatLoad(stack, books, options.rates, options.load_s, options.seed)
        await load.prepare(options.fillers)
        if LATENCY in parts:
            figures[LATENCY] = await load.measure(progress)
        if FRESHNESS in parts:
            figures[FRESHNESS] = await freshness.measure(load, options.documents, progress)
    return figures


def bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of all parts that ran."""
    result: list[Bar] = []
    if sizes := figures.get(QUALITY):
        size = "300" if "300" in sizes else next(iter(sizes))
        right = sizes[size][quality.WITH]["right"]
        result.append(at_least(f"right answers, {size} pages", right, 0.85, "share"))
    for name, part in _MEASURED.items():
        result += part.bars(figures.get(name))
    return result


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the tables of all parts that ran."""
    result = []
    if sizes := figures.get(QUALITY):
        table = Table("pages", "way", "right", "paraphrased", "page found", "tokens put in")
        for size, ways in sizes.items():
            for way, row in ways.items():
                table.add_row(
                    size, way, f"{row['right']:.0%}", f"{row['right_paraphrased']:.0%}",
                    f"{row['page_found']:.0%}", f"{row['tokens_put_in']:.0f}",
                )  # fmt: skip
        result.append(table)
    for part in _MEASURED.values():
        result += part.tables(figures)
    return result


BENCHMARK = Benchmark(
    name="retrieval",
    about=__doc__,
    run=run,
    full=RetrievalOptions(),
    quick=QUICK,
    quick_help="a small handbook, few questions, short loads",
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
