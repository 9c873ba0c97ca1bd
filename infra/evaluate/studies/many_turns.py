"""Conversations of 2 to 16 turns: how later turns fare as the history grows."""

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from infra.evaluate.paper.grid import FIRST_TURNS, RATIOS, SECOND_TURNS, Config, Workload, static
from infra.evaluate.points.point import Spec, served
from infra.evaluate.points.runs import Runner
from infra.simulator.cluster import READY_MS
from infra.simulator.traffic.poisson import Profile, poisson

TURNS = (2, 4, 8, 16)
LOAD_PER_S = 4.0  # conversations
DURATION_MS = 30_000.0
LATER = SECOND_TURNS["mid bal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """One configuration with conversations of so many turns; times in ms, of later turns."""

    config: str
    turns: int
    requests: int
    failed: int
    ttft: float
    decode_ttft: float
    tpot: float
    kv_bytes: int
    decode_ttft_by_turn: list[float]  # from turn 2 on, as far as any completed


def lengths(runner: Runner, turns: tuple[int, ...], seed: int) -> list[Length]:
    """Plain disaggregation, x=1 and `learned`, for every ratio and length."""
    specs = [
        Spec(
            config=config,
            workload=Workload(
                name=str(count),
                profile=Profile(first=FIRST_TURNS["small"], later=LATER, turns=count, think_ms=0.0),
            ),
            loads_per_s=(LOAD_PER_S,),
            seed=seed,
        )
        for pools in RATIOS
        for config in (
            static(pools, "0", plain=True),
            static(pools, "1", plain=True),
            Config(pools=pools, policy="learned"),
        )
        for count in turns
    ]
    return runner.map("2 to 16 turns", _length, specs)


def _length(spec: Spec) -> Length:
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
    cluster = served(spec, conversations)
    done = [each for each in cluster.clients.served if each.completed]
    later = [each for each in done if each.turn > 1]
    by_turn = [[each for each in later if each.turn == n] for n in range(2, profile.turns + 1)]
    by_turn = list(takewhile(bool, by_turn))
    asked = len(conversations) * profile.turns
    return Length(
        config=spec.config.name,
        turns=profile.turns,
        requests=asked,
        failed=asked - len(done),
        ttft=float(np.mean([each.ttft_ms for each in later])),
        decode_ttft=float(np.mean([each.decode_ttft_ms for each in later])),
        tpot=float(np.mean([each.tpot_ms for each in later])),
        kv_bytes=sum(cluster.links.moved_bytes.values()),
        decode_ttft_by_turn=[float(np.mean([e.decode_ttft_ms for e in turn])) for turn in by_turn],
    )
