"""Ways to place the turns of conversations, compared on live stacks of this machine.

`python -m infra.evaluate.live --engine vllm` starts one prefill and one decode worker for each way
that KV can move, holds the same number of conversations in every way, and one more worker that
answers alone: every answer must have its tokens. Prints times and KV bytes of the turns after the
first, and writes build/bench/live.json. The router starts anew for each way; workers stay.
"""

import argparse
import asyncio
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from infra import config
from infra.bench.report import BENCH_DIR, Bar, command_line, percentile, show_bars, write_report
from infra.broker.process import Broker
from infra.broker.settings import BrokerSettings
from infra.config import Settings
from infra.evaluate.conversations import Load, Turn, hold
from infra.launcher import Stack
from infra.plan import Plan
from schemas.records import MemberKind
from schemas.settings import LogSettings, ModelSettings
from streams.gateway.config import GatewaySettings
from workers.config import WorkerSettings
from workers.llm.sim_vocab import make_sim_model

_RESTART_S, _POLL_S = 60.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How turns are placed."""

    name: str
    policy: str = "static"
    local_share: float = 0.0
    orchestration: str = "prefill_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Workers that some ways can use; `engine` holds fields of the engine's section."""

    name: str
    ways: Sequence[Way]
    engine: dict[str, Any] = field(default_factory=dict)


LOCAL, LEARNED = Way(name="x=1", local_share=1.0), Way(name="learned", policy="learned")
SIM = Deployment(
    name="sim",
    engine={"decode_step_ms": 4.0, "prefill_base_ms": 10.0, "end_every_tokens": 0},
    ways=(
        Way(name="x=0"),
        Way(name="x=0 decode first", orchestration="decode_first"),
        Way(name="x=0 concurrent", orchestration="concurrent"),
        LOCAL,
        replace(LEARNED, orchestration="auto"),
    ),
)
PULL = Deployment(
    name="pull", engine={"kv_transfer": "pull"}, ways=(Way(name="x=0"), LOCAL, LEARNED)
)
PUSH = Deployment(
    name="push",
    engine={"kv_transfer": "push"},
    ways=(Way(name="x=0 push"), Way(name="x=0 concurrent", orchestration="concurrent")),
)
KEPT = Deployment(
    name="kept",
    engine={"kv_transfer": "pull", "keep_decoded_kv_ms": 60_000},
    ways=(Way(name="x=0 reading back"),),
)
DEPLOYMENTS = {"sim": (SIM,), "vllm": (PULL, PUSH, KEPT)}


async def switch(stack: Stack, way: Way) -> None:
    """Let the routers go on in another way: they start anew, with other settings."""
    router = replace(
        stack.settings.router,
        policy=way.policy,
        local_share=way.local_share,
        orchestration=way.orchestration,
    )
    stack.settings = replace(stack.settings, router=router)
    (stack.folder / "stack.toml").write_text(config.dump(stack.settings))
    kinds = stack.plan.names()
    before = {
        name: process.pid
        for name, process in stack.processes.items()
        if kinds[name] is MemberKind.ROUTER
    }
    for name in before:
        await stack.kill(name, signal.SIGTERM)
    async with asyncio.timeout(_RESTART_S):
        # The supervisor tells nobody when it has started a process again.
        while any(stack.processes[name].pid in (0, pid) for name, pid in before.items()):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    await stack.wait_ready(*before)


async def compare(stack: Stack, alone: Stack, ways: Sequence[Way], load: Load) -> dict[str, Any]:
    """The figures of each way, with how many of its answers differ from those given alone."""
    found = {}
    for way in ways:
        await switch(stack, way)
        await hold(stack, replace(load, conversations=1), f"warm {way.name}", way.name)
        turns = await hold(stack, load, way.name, way.name)
        expected = await hold(alone, load, way.name, "alone")
        found[way.name] = figures(turns, expected)
    return found


def figures(held: list[list[Turn]], expected: list[list[Turn]]) -> dict[str, Any]:
    """Medians over the turns after the first, and the sum of their KV bytes."""
    pairs = [
        (turn, alone)
        for turns, others in zip(held, expected, strict=True)
        for turn, alone in zip(turns, others, strict=True)
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
        "kv_bytes": sum(turn.kv_bytes for turn in later),
        "kv_bytes_turn_1": sum(turn.kv_bytes for turn, _ in pairs if turn.number == 1),
    }


def table(found: dict[str, Any]) -> Table:
    """What `compare` found, a row for each way."""
    columns = ("way", "answers", "different", "local", "TTFT p50", "p99", "TPOT p50", "KV MiB")
    shown = Table(*columns, title="Turns after the first (times in ms)")
    for name, row in found.items():
        shown.add_row(
            name,
            str(row["answers"]),
            str(row["different"]),
            f"{row['local_share']:.0%}",
            f"{row['ttft_ms']:.1f}",
            f"{row['ttft_ms_p99']:.1f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['kv_bytes'] / (1 << 20):.2f}",
        )
    return shown


def settings(engine: str, deployment: Deployment, log: LogSettings, model: str) -> Settings:
    """One deployment on this machine."""
    return Settings(
        log=log,
        model=ModelSettings(path=model, max_model_len=2_048),
        gateway=GatewaySettings(port=0),
        worker=WorkerSettings(engine=engine, drain_timeout_ms=2_000),
        engines={engine: deployment.engine},
    )


async def run(
    engine: str, load: Load, console: Console, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that the engine can do, or some deployments; returns the figures by way."""
    folder, found = BENCH_DIR.absolute() / "live", dict[str, Any]()
    shutil.rmtree(folder, ignore_errors=True)
    model = str(make_sim_model(folder / "model")) if engine == "sim" else "tiny"
    broker = Broker(BrokerSettings(port=0), folder / "broker", tethered=True)
    bootstrap = broker.start()  # in this thread, with which a tethered broker ends

    def started(deployment: Deployment, plan: Plan) -> Stack:
        log = LogSettings(bootstrap=bootstrap, topic_prefix=f"live-{deployment.name}.")
        made = settings(engine, deployment, log, model)
        return Stack(made, plan, folder=folder / deployment.name)

    try:
        plain = Deployment(name="alone", ways=(), engine=DEPLOYMENTS[engine][0].engine)
        replica = Plan(prefill=0, decode=0, replica=1, broker=False)
        async with started(plain, replica) as alone:
            for deployment in DEPLOYMENTS[engine]:
                if only and deployment.name not in only:
                    continue
                console.print(f"Starting the workers: {deployment.name} ...")
                async with started(deployment, Plan(broker=False)) as stack:
                    measured = await compare(stack, alone, deployment.ways, load)
                console.print(table(measured))
                found |= measured
    finally:
        broker.stop()
    _report(engine, load, found, console)
    return found


def _report(engine: str, load: Load, found: dict[str, Any], console: Console) -> None:
    different = sum(row["different"] for row in found.values())
    bar = Bar(
        name="answers that differ from one engine's alone",
        value=different,
        unit="",
        target="0",
        met=not different,
    )
    show_bars([bar], console)
    path = write_report(
        f"live-{engine}",
        command=command_line(),
        seed=load.seed,
        load=asdict(load),
        figures=found,
        bars=[bar],
    )
    console.print(f"Written to {path}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of `python -m infra.evaluate.live`."""
    parser = argparse.ArgumentParser(prog="evaluate live", description=__doc__)
    parser.add_argument("--engine", choices=tuple(DEPLOYMENTS), default="sim")
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", default=(), help="deployments: pull, push, kept")
    given = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
    engine, only = given.pop("engine"), given.pop("only")
    asyncio.run(run(engine, Load(**given), Console(), only))


if __name__ == "__main__":
    main()
