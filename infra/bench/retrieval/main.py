"""The retrieval benchmark: what documents do for answers, and what looking them up costs.

`make bench-retrieval`, or `trivium bench retrieval --quick`. Part `quality` asks a real model about
a handbook that nobody knows, part `probes` has it search while it answers, and part `early` gives
it long prompts that are computed while it searches; part `recall` searches Python's documentation
strings, beside exact searches; part `latency` measures the time to the first token with and without
a search, idle and beside a saturated decode queue; part `freshness` how soon a document is found
under load, and how fast documents come in, beside the embedding model alone; part `kept` edits
pages between questions whose answers are kept; part `losses` kills a replica and a shard under
load. Writes build/bench/retrieval.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from infra.bench.benchmark import Benchmark, Findings, counting, offered
from infra.bench.results import Bar, at_least
from infra.bench.retrieval import (
    early,
    freshness,
    kept,
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
    PROBES: probes, EARLY: early, RECALL: recall, LATENCY: latency, FRESHNESS: freshness,
    KEPT: kept, LOSSES: losses,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is asked."""

    only: tuple[str, ...] = offered((), "these parts", choices=PARTS)
    sizes: tuple[int, ...] = offered((30, 300, 3_000), "pages of the handbooks")
    questions: int = offered(300, "held out, of the smallest handbook")
    streams: int = offered(4, "questions at once")
    answer_tokens: int = offered(256, "of each answer with probes")
    rounds: int = offered(5, "of answers with probes in each way")
    prompts: int = offered(20, "long ones, that are computed during a search")
    docstrings: int = offered(0, "documents that are searched; 0: all")
    rates: tuple[float, ...] = offered((1.0, 100.0), "chats a second")
    load_s: float = offered(60.0, "s of each load")
    fillers: int = offered(20_000, "vectors that searches of the decode queue walk over")
    documents: int = offered(10_000, "that are ingested at once")
    turns: int = offered(1_000, "edits and questions")
    pairs: int = offered(4_000, "of questions, of each kind")
    kill_rate: float = offered(5.0, "chats a second while workers are killed")
    kill_s: float = offered(30.0, "s before and after each kill")
    seed: int = offered(1)


QUICK = Options(
    sizes=(30,), questions=4, streams=2, answer_tokens=64, rounds=1, prompts=3, docstrings=150,
    rates=(4.0, 20.0), load_s=1.5, fillers=4_000, documents=200, turns=30, pairs=100,
    kill_rate=4.0, kill_s=3.0,
)  # fmt: skip


async def run(options: Options, console: Console) -> Findings:
    """The parts that are wanted."""
    found: dict[str, Any] = {}
    wanted = options.only or PARTS
    with counting(console, 34) as progress:
        if {QUALITY, PROBES, EARLY} & set(wanted):
            found |= await _answers(options, wanted, progress)
        if {RECALL, LATENCY, FRESHNESS, KEPT} & set(wanted):
            found |= await _loads(options, wanted, progress)
        if LOSSES in wanted:
            found[LOSSES] = await _losses(options, progress)
    return Findings(figures=found, bars=bars(found), shown=tables(found))


async def _answers(options: Options, wanted: tuple[str, ...], progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with (
        running(answering_stack("retrieval-quality")) as stack,
        library(stack.settings.log) as books,
    ):
        url, model = stack.gateway_urls[0], stack.settings.model.served_name
        async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
            if QUALITY in wanted:
                asker = quality.Questioner(client, model, options.streams, progress)
                found[QUALITY] = await quality.measure(
                    books, asker, options.sizes, options.questions, options.seed
                )
            if PROBES in wanted:
                found[PROBES] = await probes.measure(
                    books, client, model, streams=options.streams, tokens=options.answer_tokens,
                    rounds=options.rounds, seed=options.seed, progress=progress,
                )  # fmt: skip
            if EARLY in wanted:
                found[EARLY] = await early.measure(
                    books, client, model, prompts=options.prompts, seed=options.seed,
                    progress=progress,
                )  # fmt: skip
    return found


async def _losses(options: Options, progress: Progress) -> Mapping[str, Any]:
    async with (
        running(sharded_stack("retrieval-losses")) as stack,
        library(stack.settings.log) as books,
    ):
        return await losses.measure(
            stack, books, options.kill_rate, options.kill_s, options.seed, progress
        )


async def _loads(options: Options, wanted: tuple[str, ...], progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with (
        running(simulated_stack("retrieval-load")) as stack,
        library(stack.settings.log) as books,
    ):
        if RECALL in wanted:
            found[RECALL] = await recall.measure(
                books, options.docstrings, options.questions, options.seed, progress
            )
        if KEPT in wanted:
            found[KEPT] = await kept.measure(
                stack, books, options.turns, options.pairs, options.seed, progress
            )
        if not {LATENCY, FRESHNESS} & set(wanted):
            return found
        load = latency.Load(stack, books, options.rates, options.load_s, options.seed)
        await load.prepare(options.fillers)
        if LATENCY in wanted:
            found[LATENCY] = await load.measure(progress)
        if FRESHNESS in wanted:
            found[FRESHNESS] = await freshness.measure(load, options.documents, progress)
    return found


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """What is aimed at."""
    said: list[Bar] = []
    if sizes := found.get(QUALITY):
        size = "300" if "300" in sizes else next(iter(sizes))
        right = sizes[size][quality.WITH]["right"]
        said.append(at_least(f"right answers, {size} pages", right, 0.85, "share"))
    for name, part in _MEASURED.items():
        said += part.bars(found.get(name))
    return said


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One for each part."""
    shown = []
    if sizes := found.get(QUALITY):
        table = Table("pages", "way", "right", "paraphrased", "page found", "tokens put in")
        for size, ways in sizes.items():
            for way, row in ways.items():
                table.add_row(
                    size, way, f"{row['right']:.0%}", f"{row['right_paraphrased']:.0%}",
                    f"{row['page_found']:.0%}", f"{row['tokens_put_in']:.0f}",
                )  # fmt: skip
        shown.append(table)
    for part in _MEASURED.values():
        shown += part.tables(found)
    return shown


BENCHMARK = Benchmark(
    name="retrieval",
    about=__doc__,
    run=run,
    full=Options(),
    quick=QUICK,
    quick_said="a small handbook, few questions, short loads",
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
