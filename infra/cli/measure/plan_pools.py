"""Implements `trivium plan pools`: how many workers each pool wants, and why."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from infra.cli.options import AsJson, in_panel
from infra.terminal.output import stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.planning.pools import PoolPlan, TrafficModel
    from infra.planning.traffic_log import TrafficSummary

_TRAFFIC, _HARDWARE = in_panel("Traffic"), in_panel("Hardware")
EXAMPLES = """[bold]Examples[/]

trivium plan pools --rps 60 --prompt 1000 --answer 256

trivium plan pools --trace azure_llm_2023_code.csv --searched 0.5 --every 0

trivium plan pools --rps 20 --prompt 4000 --answer 500 --ttft 300 --tpot 15 --tp 2 --json
"""


def pools(
    rps: Annotated[float | None, _TRAFFIC(help="Requests/s at the busiest time.")] = None,
    prompt: Annotated[float | None, _TRAFFIC(help="Tokens of a prompt, mean.")] = None,
    answer: Annotated[float | None, _TRAFFIC(help="Tokens of an answer, mean.")] = None,
    trace: Annotated[
        Path | None,
        _TRAFFIC(help="A traffic log, in a format that `trivium trace` reads."),
    ] = None,
    searched: Annotated[
        float, _TRAFFIC(min=0, max=1, help="Share of requests that search first.")
    ] = 1.0,
    found: Annotated[float, _TRAFFIC(min=0, help="Tokens that such a search puts in.")] = 1_024,
    every: Annotated[int, _TRAFFIC(min=0, help="Tokens between probes; 0: none.")] = 0,
    updates: Annotated[float, _TRAFFIC(min=0, help="Documents that change, per s.")] = 0.0,
    ttft: Annotated[float, typer.Option(min=1, help="Target of the first token, ms.")] = 500.0,
    tpot: Annotated[float, typer.Option(min=0.1, help="Target of a token, ms.")] = 25.0,
    gpu: Annotated[str, _HARDWARE(help="h100, h200, a100 or l4.")] = "h100",
    model: Annotated[str, _HARDWARE(help="llama-8b, qwen2.5-14b or qwen3-30b-a3b.")] = "llama-8b",
    tp: Annotated[int, _HARDWARE(min=1, max=8, help="GPUs of an LLM worker.")] = 1,
    rows: Annotated[float, _HARDWARE(min=1, help="Vectors of the index.")] = 10e6,
    dim: Annotated[int, _HARDWARE(min=1, help="Values of a vector, float16.")] = 768,
    hop_ms: Annotated[float, _HARDWARE(min=0, help="One way over the log.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Plan how many prefill, decode and retrieval workers a traffic needs, and why.

    By the rooflines of a GPU and a model. With --trace, rate and lengths are those of the traffic
    log: the busiest minute, and means; --rps, --prompt and --answer override them.
    """
    from infra.planning.hardware import (
        IndexSpec,
        SearchCosts,
        gpu_named,
        model_named,
        parallel,
    )
    from infra.planning.pools import Targets, plan
    from infra.planning.traffic_log import read
    from infra.simulator.machine.latency import Setup

    logged = None if trace is None else read(trace)
    traffic = _traffic(logged, rps, prompt, answer, searched, found, every, updates)
    gpu_spec = gpu_named(gpu)
    setup = parallel(Setup(gpu=gpu_spec, model=model_named(model)), tp)
    search = SearchCosts(gpu=gpu_spec, index=IndexSpec(rows=rows, dim=dim))
    targets = Targets(ttft_ms=ttft, tpot_ms=tpot, hop_ms=hop_ms)
    planned = plan(setup, search, traffic, targets, tp)
    if as_json:
        tree = {
            "traffic": asdict(traffic),
            "log": None if logged is None else asdict(logged),
            "targets": asdict(targets),
            "pools": [asdict(pool) for pool in planned],
            "gpus": sum(pool.gpus for pool in planned),
        }
        print(json.dumps(tree, indent=1))
        return
    console = stdout_console()
    console.print(_table(planned, traffic, logged))
    for pool in planned:
        console.print(f"{pool.name}: {pool.why}", soft_wrap=True)


def _traffic(
    logged: "TrafficSummary | None",
    rps: float | None,
    prompt: float | None,
    answer: float | None,
    searched: float,
    found_tokens: float,
    every: int,
    updates: float,
) -> "TrafficModel":
    from infra.planning.pools import ProbeSettings, TrafficModel

    if logged is not None:
        rps = logged.busiest_per_s if rps is None else rps
        prompt = logged.prompt_tokens if prompt is None else prompt
        answer = logged.answer_tokens if answer is None else answer
    if rps is None or prompt is None or answer is None:
        raise ConfigError(
            "plan pools: expected --rps, --prompt and --answer, or a traffic log with --trace; see "
            "`trivium plan pools --help`"
        )
    return TrafficModel(
        per_s=rps,
        prompt_tokens=prompt,
        answer_tokens=answer,
        searched=searched,
        found_tokens=found_tokens,
        probing=ProbeSettings(every=every),
        updates_per_s=updates,
    )


def _table(
    planned: "list[PoolPlan]", traffic: "TrafficModel", logged: "TrafficSummary | None"
) -> Table:
    gpus = sum(pool.gpus for pool in planned)
    title = f"{traffic.per_s:.1f} requests/s, {gpus} GPUs"
    if logged is not None:
        title += f" (log: {logged.requests} requests, {logged.mean_per_s:.1f}/s on average)"
    table = Table("pool", "workers", "GPUs", "busy", "then", box=None, title=title)
    figure_names = {"prefill": "first token", "decode": "a token", "retrieval": "a search"}
    for pool in planned:
        table.add_row(
            pool.name,
            str(pool.workers),
            str(pool.gpus),
            f"{pool.utilisation:.1%}",
            f"{figure_names[pool.name]} {pool.figure_ms:.1f} ms",
        )
    return table
