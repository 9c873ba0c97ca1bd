"""Implements `trivium bench` and `trivium demo`: runs benchmarks and the demo."""

import importlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.bench.benchmark import Benchmark

BENCHMARKS = {
    "serving": "infra.bench.serving.main",
    "costs": "infra.bench.costs.main",
    "decisions": "infra.bench.decisions.main",
    "chaos": "infra.bench.faults.chaos",
    "kills": "infra.bench.faults.kills",
    "rolling": "infra.bench.faults.rolling",
    "pauses": "infra.bench.faults.pauses",
    "soak": "infra.bench.faults.soak",
    "takeover": "infra.bench.takeover.main",
    "vllm": "infra.bench.vllm.main",
    "vllm-faults": "infra.bench.vllm.faults",
    "attempts": "infra.bench.vllm.batch_effects",
    "search": "infra.bench.search.main",
    "search-gpu": "infra.bench.search.gpu.main",
    "retrieval": "infra.bench.retrieval.main",
    "platform": "infra.bench.platform.main",
}
_BENCH_USAGE = """Usage: trivium bench NAME [OPTIONS]

Run a benchmark; the options after its name go to it. Results are in build/bench.

  serving     Trivium beside a direct engine and two HTTP proxies
  costs       what one request and an idle stack cost: CPU, wake-ups, records, bytes, memory
  decisions   placement in a fleet of 200 workers, 100 000 sessions, 1 M known KV blocks
  chaos       processes and the broker die under load; what is lost, double, wrong or late
  kills       Dynamo's protocol: one process of each kind killed, failed requests of 800
  rolling     every process restarted under load, then brokers killed; requests that fail
  pauses      how long answers stand still when their worker is killed
  soak        memory of gateway and router over 100 000 streams
  takeover    how long a router takes to rebuild its partitions, after an hour of traffic
  vllm        Trivium beside vLLM's own serving, with the same engines
  vllm-faults real vLLM: a killed decode worker, an abort storm, KV that must not be used
  attempts    how often vLLM answers otherwise in another batch
  search      the vector engine beside hnswlib, faiss and usearch
  search-gpu  the same on a CUDA device, beside cuVS where that is installed
  retrieval   right answers with documents, and what looking them up costs
  platform    prompts on a topic and batches while processes die: one answer each, who used what

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
        print(_BENCH_USAGE)
        return
    if name not in BENCHMARKS:
        raise ConfigError(f"bench: expected one of {', '.join(BENCHMARKS)}, found {name!r}")
    sys.argv = [f"trivium bench {name}", *context.args]
    benchmark(name).main()


def benchmark(name: str) -> "Benchmark[Any]":
    """Import and return one of `BENCHMARKS`."""
    target: Benchmark[Any] = importlib.import_module(BENCHMARKS[name]).BENCHMARK
    return target
