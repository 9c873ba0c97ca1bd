"""The retrieval benchmark: what documents do for answers, and what looking them up costs.

`make bench-retrieval`, or `trivium bench retrieval --quick`. Part `quality` asks a real model about
a handbook that nobody knows; part `recall` searches Python's documentation strings, beside exact
searches; part `latency` measures the time to the first token with and without a
search, idle and beside a saturated decode queue; part `freshness` how soon a document is found
under load, and how fast documents come in, beside the embedding model alone. Writes
build/bench/retrieval.json.
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
from infra.bench.retrieval import freshness, latency, quality, recall
from infra.bench.retrieval.stacks import answering_stack, running, simulated_stack
from infra.handbook.library import library

QUALITY, RECALL, LATENCY, FRESHNESS = "quality", "recall", "latency", "freshness"
PARTS = (QUALITY, RECALL, LATENCY, FRESHNESS)
_PATIENCE_S = 600.0  # for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is asked."""

    only: tuple[str, ...] = offered((), "these parts", choices=PARTS)
    sizes: tuple[int, ...] = offered((30, 300, 3_000), "pages of the handbooks")
    questions: int = offered(300, "held out, of the smallest handbook")
    streams: int = offered(4, "questions at once")
    rates: tuple[float, ...] = offered((1.0, 20.0), "chats a second")
    load_s: float = offered(60.0, "s of each load")
    fillers: int = offered(20_000, "vectors that searches of the decode queue walk over")
    documents: int = offered(10_000, "that are ingested at once")
    seed: int = offered(1)


QUICK = Options(
    sizes=(30, 300), questions=24, rates=(1.0, 10.0), load_s=10.0, fillers=5_000, documents=500
)


async def run(options: Options, console: Console) -> Findings:
    """The parts that are wanted."""
    found: dict[str, Any] = {}
    wanted = options.only or PARTS
    with counting(console, 34) as progress:
        if QUALITY in wanted:
            found[QUALITY] = await _quality(options, progress)
        if {RECALL, LATENCY, FRESHNESS} & set(wanted):
            found |= await _loads(options, wanted, progress)
    return Findings(figures=found, bars=bars(found), shown=tables(found))


async def _quality(options: Options, progress: Progress) -> Mapping[str, Any]:
    async with (
        running(answering_stack("retrieval-quality")) as stack,
        library(stack.settings.log) as books,
    ):
        url, model = stack.gateway_urls[0], stack.settings.model.served_name
        async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
            asker = quality.Questioner(client, model, options.streams, progress)
            return await quality.measure(
                books, asker, options.sizes, options.questions, options.seed
            )


async def _loads(options: Options, wanted: tuple[str, ...], progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with (
        running(simulated_stack("retrieval-load")) as stack,
        library(stack.settings.log) as books,
    ):
        if RECALL in wanted:
            found[RECALL] = await recall.measure(books, options.questions, options.seed, progress)
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
    said += recall.bars(found.get(RECALL))
    return [*said, *latency.bars(found.get(LATENCY)), *freshness.bars(found.get(FRESHNESS))]


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
    for part in (recall, latency, freshness):
        shown += part.tables(found)
    return shown


BENCHMARK = Benchmark(
    name="retrieval",
    about=__doc__,
    run=run,
    full=Options(),
    quick=QUICK,
    quick_said="two handbooks, 24 questions, short loads",
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
