"""Implements `trivium bench` and `trivium demo`: runs benchmarks and the demo."""

import importlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.bench.benchmark import Benchmark

_ROWS = (  # name, module, what it measures
    ("serving", "serving.main", "Trivium beside a direct engine and two HTTP proxies"),
    ("costs", "costs.main", "what one request and an idle stack cost: CPU, records, memory"),
    ("decisions", "decisions.main", "placement among 200 workers, 100 000 sessions, 1 M KV blocks"),
    ("chaos", "faults.chaos", "processes and the broker die under load; what is lost or wrong"),
    ("kills", "faults.kills", "Dynamo's protocol: one process of each kind killed"),
    ("rolling", "faults.rolling", "every process restarted under load, then brokers killed"),
    ("pauses", "faults.pauses", "how long answers stand still when their worker is killed"),
    ("soak", "faults.soak", "memory of gateway and router over 100 000 streams"),
    ("takeover", "takeover.main", "how long a router takes to rebuild its partitions"),
    ("vllm", "vllm.main", "Trivium beside vLLM's own serving, with the same engines"),
    ("vllm-faults", "vllm.faults", "real vLLM: a killed worker, an abort storm, KV not to be used"),
    ("attempts", "vllm.batch_effects", "how often vLLM answers otherwise in another batch"),
    ("search", "search.main", "the vector engine beside hnswlib, faiss and usearch"),
    ("search-gpu", "search.gpu.main", "the same on a CUDA device, beside cuVS if it is installed"),
    ("retrieval", "retrieval.main", "right answers with documents, and what looking them up costs"),
    ("platform", "platform.main", "prompts on a topic and batches while processes die"),
)
BENCHMARKS = {name: f"infra.bench.{module}" for name, module, _ in _ROWS}
_BENCH_USAGE = """Usage: trivium bench NAME [OPTIONS]

Run a benchmark; the options after its name go to it. Results are in build/bench.

{}

Examples: `trivium bench serving --quick`, `trivium bench serving --help`"""
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def demo(
    engine: Annotated[str, typer.Option(help="vllm, or sim for a quick look.")] = "vllm",
    platform: Annotated[
        bool, typer.Option("--platform", help="With PostgreSQL and Kafka Connect instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Hold conversations, and explain one.

    Hold conversations through Kafka, real engines and NIXL, look answers up, and explain one.

    With `--platform`: a database's rows become searchable, and its table of questions gets answers.
    Examples: `trivium demo`, `trivium demo --engine sim --json | jq .good`,
    `trivium demo --platform`
    """
    if platform:
        from infra.platform.demo import run
    else:
        from infra.demo.main import run

    raise typer.Exit(run(engine=engine, as_json=as_json))


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which benchmark.", show_default="all names")] = "",
) -> None:
    """Run a benchmark by its name."""
    if name in ("", "-h", "--help"):
        print(_BENCH_USAGE.format("\n".join(f"  {name:<11} {about}" for name, _, about in _ROWS)))
        return
    if name not in BENCHMARKS:
        raise ConfigError(f"bench: expected one of {', '.join(BENCHMARKS)}, found {name!r}")
    sys.argv = [f"trivium bench {name}", *context.args]
    benchmark(name).main()


def benchmark(name: str) -> "Benchmark[Any]":
    """Import and return one of `BENCHMARKS`."""
    target: Benchmark[Any] = importlib.import_module(BENCHMARKS[name]).BENCHMARK
    return target
