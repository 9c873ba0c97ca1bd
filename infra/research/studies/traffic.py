"""Real traffic through the simulator: every policy on windows of two published traces."""

from pathlib import Path

from infra.planning.grid import WORKLOADS, Config, static
from infra.planning.point import Spec
from infra.planning.runs import Runner
from infra.research.studies.served import ServedRow, serve
from infra.simulator.cluster import READY_MS
from infra.simulator.machine.latency import Setup
from infra.simulator.traffic import traces
from infra.simulator.traffic.traces import FILES
from infra.traces.formats import read
from infra.traces.trace import Arrival
from schemas.errors import ConfigError

POOLS = "2P2D"
# Virtual time, whole and quick: all of Mooncake's trace, a part of Azure's.
WINDOW_MS = {"azure code": (240_000.0, 60_000.0), "mooncake synthetic": (2_400_000.0, 300_000.0)}
# Time is scaled to four GPUs: for these, Azure's load is too low and Mooncake's too high.
FASTER = {"azure code": 4.0, "mooncake synthetic": 0.5}
KV_SHARE_MAX = 0.4
CONFIGS = (
    static(POOLS, "0", plain=True),
    static(POOLS, "0"),
    static(POOLS, "1"),
    Config(pools=POOLS, policy="conditional"),
    Config(pools=POOLS, policy="learned"),
    Config(pools=POOLS, policy="round_robin"),  # this one and `pairs`: the Neuron guide's
    Config(pools=POOLS, policy="pairs"),
    Config(pools="4R", policy="replica"),
)


def simulate_traces(runner: Runner, folder: Path, seed: int, *, quick: bool) -> list[ServedRow]:
    """Simulate every trace in the folder with every policy; raises ConfigError if a trace is
    missing."""
    tasks = []
    for name, file in FILES.items():
        if not (folder / file).is_file():
            raise ConfigError(
                f"evaluate: expected {file} in {folder}; name its folder with --traces"
            )
        arrivals = traces.window(
            read(folder / file).arrivals, WINDOW_MS[name][quick] * FASTER[name], seed
        )
        tasks += [(name, config, arrivals, seed) for config in CONFIGS]
    return runner.map("real traffic", _run, tasks)


def _run(task: tuple[str, Config, list[Arrival], int]) -> ServedRow:
    name, config, arrivals, seed = task
    spec = Spec(
        config=config,
        workload=WORKLOADS[0],
        loads_per_s=(),
        seed=seed,
        setup=Setup(),
        conversations_max=0,
        published=False,  # a connector's buffer is smaller than some of the prompts
    )
    conversations = traces.script(
        arrivals,
        begin_ms=READY_MS,
        faster=FASTER[name],
        block_tokens=spec.setup.block_tokens,
    )
    return serve(name, spec, conversations)
