"""Figure 9: later turns as the history grows (a), and with larger models (b).

The workload, the load and the duration are those of the authors' scripts: turns of 128 prompt and
128 answer tokens, 4 conversations/s, 30 s. Each model is on one GPU, as in their set-up.
"""

from dataclasses import replace

from infra.planning.grid import FIRST_TURNS, RATIOS, SECOND_TURNS, Config, Workload, static
from infra.planning.point import SETUP, Spec
from infra.planning.runs import Runner
from infra.research.studies.served import ServedRow, serve
from infra.simulator.cluster import READY_MS
from infra.simulator.machine.latency import LLAMA_8B, QWEN_14B, QWEN_30B
from infra.simulator.traffic.poisson import Profile

TURNS = (2, 4, 8, 16)
LOAD_PER_S = 4.0  # conversations
DURATION_MS = 30_000.0
LATER = SECOND_TURNS["mid bal"]
MEMORY_SHARES = {LLAMA_8B.name: 0.9, QWEN_14B.name: 0.92, QWEN_30B.name: 0.95}  # as in their script
REPLICAS = Config(pools="4R", policy="replica", plain=True)
HYBRID = static("1P2D1R", "1", plain=True)
MODEL_POOLS = "2P2D"


def lengths(runner: Runner, turns: tuple[int, ...], seed: int) -> list[ServedRow]:
    """Run replicas, a hybrid, and plain x=0, plain x=1 and `learned` of each ratio, at every
    length."""
    configs = [REPLICAS, HYBRID, *(config for pools in RATIOS for config in _configs(pools))]
    return runner.map(
        "figure 9a", _length, [_spec(config, count, seed) for config in configs for count in turns]
    )


def models(runner: Runner, seed: int) -> list[ServedRow]:
    """Run replicas, plain x=0, plain x=1 and `learned`, with two turns, for every model."""
    specs = []
    for model in (LLAMA_8B, QWEN_14B, QWEN_30B):
        gpu = replace(SETUP.gpu, memory_share=MEMORY_SHARES[model.name])
        setup = replace(SETUP, model=model, gpu=gpu)
        specs += [
            replace(_spec(config, 2, seed), setup=setup)
            for config in (REPLICAS, *_configs(MODEL_POOLS))
        ]
    return runner.map("figure 9b", _length, specs)


def _configs(pools: str) -> tuple[Config, ...]:
    return (
        static(pools, "0", plain=True),
        static(pools, "1", plain=True),
        Config(pools=pools, policy="learned"),
    )


def _spec(config: Config, turns: int, seed: int) -> Spec:
    profile = Profile(first=FIRST_TURNS["small"], later=LATER, turns=turns, think_ms=0.0)
    workload = Workload(name=str(turns), profile=profile)
    return Spec(config=config, workload=workload, loads_per_s=(LOAD_PER_S,), seed=seed)


def _length(spec: Spec) -> ServedRow:
    (load,) = spec.loads_per_s
    conversations = spec.arrivals(load, begin_ms=READY_MS, duration_ms=DURATION_MS, name="turns")
    turns = spec.workload.profile.turns
    return serve(spec.setup.model.name, spec, conversations, load_per_s=load, turns=turns)
