"""Conversations like ShareGPT's: where plain disaggregation lost requests in the paper.

Lengths are drawn from exponentials with the means that the vLLM paper gives for ShareGPT (Kwon et
al., SOSP 2023, figure 11); numbers of turns, limits, loads and client are those of the authors'
benchmark (500 conversations with 2 204 turns in all, at least two each).
"""

from dataclasses import dataclass

import numpy as np

from infra.evaluate.paper.grid import CONVERSATIONS_MAX, RATIOS, WORKLOADS, Config, static
from infra.evaluate.points import point
from infra.evaluate.points.point import Spec
from infra.evaluate.points.runs import Runner
from infra.simulator.cluster import READY_MS
from infra.simulator.traffic.poisson import unlike_others
from infra.simulator.traffic.script import Conversation, Turn, conversation

LOADS_PER_S = (2.0, 4.0, 8.0, 12.0)
CONVERSATIONS = 500
INPUT_TOKENS, OUTPUT_TOKENS = 161.31, 337.99  # means
TOKENS_MIN, TOKENS_MAX = 4, 2_048  # of a question and of an answer
CONTEXT_MAX = 8_192
TURNS_MEAN, TURNS_MIN, TURNS_MAX = 4.4, 2, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One configuration at one load. Turns that were never sent failed too."""

    config: str
    load_per_s: float
    turns: int
    failed: int
    later_ttft_p50: float  # ms, of the decode worker's first token; 0 where none completed
    buffered_bytes: int  # most that a connector held beside the engine's memory
    crashed: int


def served(runner: Runner, seed: int, *, quick: bool) -> list[Served]:
    """Plain x=0 and x=1, and `learned`, for every ratio and load."""
    tasks = [
        (config, load, CONVERSATIONS // (5 if quick else 1), seed)
        for pools in RATIOS
        for config in (
            static(pools, "0", plain=True),
            static(pools, "1", plain=True),
            Config(pools=pools, policy="learned"),
        )
        for load in (LOADS_PER_S[2:3] if quick else LOADS_PER_S)
    ]
    return runner.map("ShareGPT", _run, tasks)


def conversations(
    per_s: float, count: int, block_tokens: int, seed: int, *, prefill_heavy: bool = False
) -> list[Conversation]:
    """So many, as a Poisson process; each turn follows the last one at once.

    Prefill-heavy: only such in which more is asked than answered.
    """
    draw = np.random.default_rng([seed, int(per_s * 1000)])
    at_ms, found = READY_MS, list[Conversation]()
    while len(found) < count:
        turns, said = list[Turn](), 0
        extra = draw.geometric(1 / (TURNS_MEAN - TURNS_MIN + 1)) - 1
        for _ in range(min(TURNS_MIN + int(extra), TURNS_MAX)):
            asked, answered = (
                int(np.clip(draw.exponential(mean), TOKENS_MIN, TOKENS_MAX))
                for mean in (INPUT_TOKENS, OUTPUT_TOKENS)
            )
            if said + asked > CONTEXT_MAX:
                break
            turns.append(Turn(prompt_tokens=said + asked, output_tokens=answered))
            said += asked + answered
        if prefill_heavy and 2 * sum(turn.output_tokens for turn in turns) >= said:
            continue
        at_ms += draw.exponential(1e3 / per_s)
        tokens = unlike_others(len(found), said)
        found.append(conversation(f"s{len(found)}", at_ms, turns, tokens, block_tokens))
    return found


def _run(task: tuple[Config, float, int, int]) -> Served:
    config, load, count, seed = task
    spec = Spec(
        config=config,
        workload=WORKLOADS[0],
        loads_per_s=(load,),
        seed=seed,
        conversations_max=CONVERSATIONS_MAX,
    )
    held = conversations(load, count, spec.setup.block_tokens, seed)
    cluster = point.served(spec, held)
    done = [each for each in cluster.clients.served if each.completed]
    later = [each.decode_ttft_ms for each in done if each.turn > 1]
    turns = sum(len(each.turns) for each in held)
    pressure = point.pressure(cluster)
    return Served(
        config=config.name,
        load_per_s=load,
        turns=turns,
        failed=turns - len(done),
        later_ttft_p50=float(np.median(later)) if later else 0.0,
        buffered_bytes=pressure["buffered_bytes"],
        crashed=pressure["crashed"],
    )
