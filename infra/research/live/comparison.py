"""Compares router settings and KV transfers on live stacks of this machine.

`trivium evaluate ppd --live` starts one prefill and one decode worker for each deployment, and runs
the same conversations with each routing variant and on a single replica: every answer must have the
replica's tokens. The router restarts for each variant; workers stay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from infra.bench.results import BENCH_DIR, Bar, command_line, percentile, write_report
from infra.planning.grid import WORKLOADS
from infra.planning.live_conversations import LiveLoad, LiveTurn, hold
from infra.planning.live_stack import DEPLOYMENTS, Deployment, RoutingVariant, machine, switch
from infra.research.report.pages import Columns, draw_bars, draw_png, render, terminal_table
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.story.record_finder import read_stories
from schemas.errors import ConfigError

FiguresByLoad = dict[str, dict[str, Any]]  # by load and by variant


def choose_loads(
    workloads: Sequence[str],
    loads_per_s: Sequence[float],
    *,
    turns: int,
    conversations: int,
    streams: int,
    scale: float,
    seed: int,
) -> list[LiveLoad]:
    """Return parts of the paper's grid, with lengths scaled to small models (prompts in words).

    Raises ConfigError for a workload that is not in the grid.
    """
    profiles = {workload.name: workload.profile for workload in WORKLOADS}
    loads = []
    for name in workloads:
        if name not in profiles:
            raise ConfigError(f"--workload: expected one of {'; '.join(profiles)}, found {name!r}")
        first, later = profiles[name].first, profiles[name].later
        lengths = (first.input_tokens, first.output_tokens, later.input_tokens, later.output_tokens)
        words, answer, new_words, new_answer = (max(4, round(scale * length)) for length in lengths)
        loads += [
            LiveLoad(
                name=f"{name} at {per_s:g}/s",
                conversations=conversations,
                turns=turns,
                streams=streams,
                per_s=per_s,
                first_words=words,
                first_tokens=answer,
                words=new_words,
                tokens=new_answer,
                seed=seed,
            )
            for per_s in loads_per_s
        ]
    return loads


async def compare(
    stack: Stack,
    alone: Stack,
    variants: Sequence[RoutingVariant],
    load: LiveLoad,
    on_variant_end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the figures of each variant, with the number of answers that differ from the
    replica's."""
    turns_by_variant = {}
    for variant in variants:
        await switch(stack, variant)
        name = f"{load.name} {variant.name}".strip()
        await hold(stack, replace(load, conversations=1), f"warm {name}", variant.name)
        turns = await hold(stack, load, name, variant.name)
        expected = await hold(alone, replace(load, per_s=0.0), name, "alone")
        turns_by_variant[variant.name] = turns, expected
        on_variant_end()
    stories = await read_stories(stack.settings.log)
    moved_bytes = {request_id: story.kv_bytes for request_id, story in stories.items()}
    return {variant: figures(*turns, moved_bytes) for variant, turns in turns_by_variant.items()}


def figures(
    turns: list[list[LiveTurn]], expected: list[list[LiveTurn]], moved_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """Return medians over the turns after the first, and the sum of the KV bytes that they moved.

    `moved_bytes` has the KV bytes of each request in both directions; an answer reports only those
    that its worker received.
    """
    pairs = [
        (turn, alone)
        for turns, alone_turns in zip(turns, expected, strict=True)
        for turn, alone in zip(turns, alone_turns, strict=True)
    ]
    later = [turn for turn, _ in pairs if turn.number > 1]
    modes = [turn.mode for turn in later]
    return {
        "answers": len(pairs),
        "different": sum(turn.token_ids != alone.token_ids for turn, alone in pairs),
        "local_share": modes.count("local") / len(modes),
        "ttft_ms": percentile([turn.ttft_ms for turn in later], 50),
        "ttft_ms_p99": percentile([turn.ttft_ms for turn in later], 99),
        "tpot_ms": percentile([turn.tpot_ms for turn in later], 50),
        "kv_bytes": sum(moved_bytes[turn.request_id] for turn in later),
        "kv_bytes_turn_1": sum(moved_bytes[t.request_id] for t, _ in pairs if t.number == 1),
    }


_COLUMNS: Columns = {
    "way": "{way}",
    "answers": "{answers}",
    "different": "{different}",
    "local": "{local_share:.0%}",
    "TTFT p50, ms": "{ttft_ms:.1f}",
    "p99, ms": "{ttft_ms_p99:.1f}",
    "TPOT p50, ms": "{tpot_ms:.2f}",
    "KV, MiB": lambda row: f"{row['kv_bytes'] / (1 << 20):.2f}",
}


def _rows(figures_by_variant: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"way": variant, **row} for variant, row in figures_by_variant.items()]


def table(name: str, figures_by_variant: dict[str, Any]) -> Table:
    """Return a table with a row of figures for each variant."""
    title = f"{name}: turns after the first".strip(": ")
    return terminal_table(_rows(figures_by_variant), _COLUMNS, title)


async def run(
    engine: str, loads: Sequence[LiveLoad], console: Console, only: Sequence[str] = ()
) -> FiguresByLoad:
    """Run every variant that the engine supports, or some deployments, at every load."""
    deployments = [
        deployment for deployment in DEPLOYMENTS[engine] if not only or deployment.name in only
    ]
    if not deployments:
        names = ", ".join(deployment.name for deployment in DEPLOYMENTS[engine])
        raise ConfigError(f"--only: expected some of {names}, found {', '.join(only)}")
    plain = Deployment(name="alone", variants=(), engine=DEPLOYMENTS[engine][0].engine)
    figures_by_load: FiguresByLoad = {load.name: {} for load in loads}
    with machine(engine, BENCH_DIR.absolute() / "live") as build, Progress(console=console) as bars:
        total = len(loads) * sum(len(deployment.variants) for deployment in deployments)
        bar = bars.add_task("starting", total=total)
        async with build(plain, StackPlan(prefill=0, decode=0, replica=1, broker=False)) as alone:
            for deployment in deployments:
                async with build(deployment, StackPlan(broker=False)) as stack:
                    bars.update(bar, description=deployment.name)
                    for load in loads:
                        figures_by_load[load.name] |= await compare(
                            stack, alone, deployment.variants, load, lambda: bars.advance(bar)
                        )
    return figures_by_load


def write(
    engine: str, loads: Sequence[LiveLoad], figures_by_load: FiguresByLoad, folder: Path
) -> Path:
    """Write live-ENGINE.json, .png and .html, and return the page's path."""
    different = sum(row["different"] for part in figures_by_load.values() for row in part.values())
    bar = Bar(
        name="answers that differ from one engine's alone",
        value=different,
        unit="",
        target="0",
        met=not different,
    )
    write_report(
        f"live-{engine}",
        command=command_line(),
        seed=loads[0].seed,
        load={load.name: asdict(load) for load in loads},
        figures=figures_by_load,
        bars=[bar],
        folder=folder,
    )
    png = draw_png(_draw, figures_by_load)
    (folder / f"live-{engine}.png").write_bytes(png)
    path = folder / f"live-{engine}.html"
    tables = {
        name: _rows(figures_by_variant) for name, figures_by_variant in figures_by_load.items()
    }
    context = {"engine": engine, "bar": bar, "figures_by_load": tables, "columns": _COLUMNS}
    path.write_text(render("live.jinja", {"live": png}, **context))
    return path


def _draw(figure: Any, figures_by_load: FiguresByLoad) -> None:
    """Draw time to first token by variant, for each load that was run live."""
    variants = list(next(iter(figures_by_load.values())))
    values = {
        name: [row["ttft_ms"] for row in rows.values()] for name, rows in figures_by_load.items()
    }
    draw_bars(figure.add_subplot(), variants, values, "TTFT p50 of later turns, ms", 20)
