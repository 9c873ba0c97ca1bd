"""Figure 9: later turns as the history grows (a), and with larger models (b).

The workload, the load and the duration are those of the authors' scripts: turns of 128 prompt and
128 answer tokens, 4 conversations/s, 30 s. Each model is on one GPU, as in their set-up.
"""

from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from infra.planning.grid import FIRST_TURNS, RATIOS, SECOND_TURNS, Config, Workload, static
from infra.planning.point import SETUP, Spec, serve
from infra.planning.runs import Runner
from infra.simulator.cluster import READY_MS
from infra.simulator.machine.latency import LLAMA_8B, QWEN_14B, QWEN_30B
from infra.simulator.traffic.poisson import Profile, poisson

TURNS = (2, 4, 8, 16)
LOAD_PER_S = 4.0  # conversations
DURATION_MS = 30_000.0
LATER = SECOND_TURNS["mid bal"]
MEMORY_SHARES = {LLAMA_8B.name: 0.9, QWEN_14B.name: 0.92, QWEN_30B.name: 0.95}  # as in their script
REPLICAS = Config(pools="4R", policy="replica", plain=True)
HYBRID = static("1P2D1R", "1", plain=True)
MODEL_POOLS = "2P2D"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCountResult:
    """One configuration with conversations of `turns` turns; times in ms, of later turns."""

    config: str
    model: str
    turns: int
    requests: int
    failed: int
    ttft: float
    decode_ttft: float
    tpot: float
    kv_bytes: int
    decode_ttft_by_turn: list[float]  # from turn 2 to the last turn that any conversation completed


def lengths(runner: Runner, turns: tuple[int, ...], seed: int) -> list[TurnCountResult]:
    """Run replicas, a hybrid, and plain x=0, plain x=1 and `learned` of each ratio, at every
    length."""
    configs = [REPLICAS, HYBRID, *(config for pools in RATIOS for config in _configs(pools))]
    return runner.map(
        "figure 9a", _length, [_spec(config, count, seed) for config in configs for count in turns]
    )


def models(runner: Runner, seed: int) -> list[TurnCountResult]:
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


def _length(spec: Spec) -> TurnCountResult:
    profile = spec.workload.profile
    conversations = poisson(
        profile,
        per_s=spec.loads_per_s[0],
        duration_ms=DURATION_MS,
        begin_ms=READY_MS,
        block_tokens=spec.setup.block_tokens,
        seed=[spec.seed],
        name="turns",
    )
    cluster = serve(spec, conversations)
    answers = [request for request in cluster.clients.requests if request.completed]
    later = [answer for answer in answers if answer.turn > 1]
    by_turn = [
        [answer for answer in later if answer.turn == n] for n in range(2, profile.turns + 1)
    ]
    by_turn = list(takewhile(bool, by_turn))
    turn_count = len(conversations) * profile.turns
    return TurnCountResult(
        config=spec.config.name,
        model=spec.setup.model.name,
        turns=profile.turns,
        requests=turn_count,
        failed=turn_count - len(answers),
        ttft=float(np.mean([answer.ttft_ms for answer in later])),
        decode_ttft=float(np.mean([answer.decode_ttft_ms for answer in later])),
        tpot=float(np.mean([answer.tpot_ms for answer in later])),
        kv_bytes=sum(cluster.links.moved_bytes.values()),
        decode_ttft_by_turn=[float(np.mean([e.decode_ttft_ms for e in turn])) for turn in by_turn],
    )
