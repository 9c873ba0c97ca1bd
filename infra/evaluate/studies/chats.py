"""Figure 4: conversations like ShareGPT's and WildChat's, at 12 loads, with equal weights.

The authors' clients hold 500 real conversations of at least two turns, whose messages have at most
2 048 tokens and whose contexts at most 8 192. Neither data set is here, so lengths are drawn, from
distributions with the published means; numbers of turns are those of the authors' raw results.
Dynamic PPD is their table behind their proxy, made from the grid's plain points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infra.evaluate.paper import ppd_paper
from infra.evaluate.paper.grid import CONVERSATIONS_MAX, RATIOS, WORKLOADS, Config, static
from infra.evaluate.points import point
from infra.evaluate.points.point import Spec
from infra.evaluate.points.runs import Runner
from infra.simulator.cluster import READY_MS
from infra.simulator.traffic.poisson import unlike_others
from infra.simulator.traffic.script import Conversation, Turn, conversation
from schemas.records import Mode
from streams.core.placement.ppd_table import PpdTable

LOADS_PER_S = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 20.0)
QUICK_LOADS_PER_S = (2.0, 8.0)
CONVERSATIONS, QUICK_CONVERSATIONS = 200, 50
TOKENS_MIN, TOKENS_MAX = 4, 2_048  # of a question and of an answer
CONTEXT_MAX = 8_192
TURNS_MIN, TURNS_MAX = 2, 20
EQUAL = (1.0, 1.0)  # weights of TTFT and TPOT

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A set of conversations: how they are drawn."""

    name: str
    asked: Draw
    answered: Draw
    turns_mean: float


def _exponential(mean: float) -> Draw:
    return lambda draw: float(draw.exponential(mean))


def _lognormal(mean: float, deviation: float) -> Draw:
    variance = float(np.log1p((deviation / mean) ** 2))
    middle = float(np.log(mean)) - variance / 2
    return lambda draw: float(draw.lognormal(middle, variance**0.5))


ASKED_TOKENS, ANSWERED_TOKENS = 161.31, 337.99  # ShareGPT (Kwon et al., SOSP 2023, figure 11)
SHAREGPT = Source(
    name="ShareGPT",
    asked=_exponential(ASKED_TOKENS),
    answered=_exponential(ANSWERED_TOKENS),
    turns_mean=2_204 / 500,
)
WILDCHAT = Source(  # means and deviations of its paper (Zhao et al., ICLR 2024, table 1)
    name="WildChat",
    asked=_lognormal(295.58, 1_609.18),
    answered=_lognormal(441.34, 410.91),
    turns_mean=2_056 / 500,
)
SOURCES = {source.name: source for source in (SHAREGPT, WILDCHAT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One configuration at one load; times in ms. Turns that were never sent failed too."""

    source: str
    config: str
    load_per_s: float
    turns: int
    failed: int
    latency: float  # mean of completed turns, from the question to the last token
    later_ttft_p50: float  # of the decode worker's first token; 0 where none completed
    tpot: float  # mean
    local_share: float  # of later turns
    kv_bytes: int
    buffered_bytes: int  # most that a connector held beside the engine's memory
    crashed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One configuration beside plain x=0 of the same pools and source, in percent."""

    source: str
    config: str
    latency: tuple[float, float]  # least and most, over loads at which x=0 loses nothing
    kv_bytes: float  # median over the same loads
    degraded: int  # loads at which less than `SUCCESS_MIN` of the turns completed
    degraded_x0: int
    loads: int


Tables = dict[str, PpdTable]  # by pools


def served(runner: Runner, plain: Tables, seed: int, *, quick: bool) -> list[Served]:
    """Plain x=0, x=1 and dynamic PPD, and `learned`, for every source, ratio and load."""
    tasks = [
        (source, config, plain.get(pools), load, seed, quick)
        for source in SOURCES
        for pools in RATIOS
        for config in (
            static(pools, "0", plain=True),
            static(pools, "1", plain=True),
            Config(pools=pools, policy="table", plain=True),
            Config(pools=pools, policy="learned"),
        )
        for load in (QUICK_LOADS_PER_S if quick else LOADS_PER_S)
    ]
    return runner.map("figure 4", _run, tasks)


def conversations(
    sources: Sequence[Source],
    per_s: float,
    count: int,
    block_tokens: int,
    seed: int,
    *,
    prefill_heavy: bool = False,
) -> list[Conversation]:
    """So many, of the sources in turn, as a Poisson process; each turn follows the last one at
    once.

    Prefill-heavy: only such in which more is asked than answered.
    """
    draw = np.random.default_rng([seed, int(per_s * 1000)])
    at_ms, found = READY_MS, list[Conversation]()
    while len(found) < count:
        turns, said = _turns(sources[len(found) % len(sources)], draw)
        if prefill_heavy and 2 * sum(turn.output_tokens for turn in turns) >= said:
            continue
        at_ms += draw.exponential(1e3 / per_s)
        tokens = unlike_others(len(found), said)
        found.append(conversation(f"s{len(found)}", at_ms, turns, tokens, block_tokens))
    return found


def _turns(source: Source, draw: np.random.Generator) -> tuple[list[Turn], int]:
    """Of one conversation, and the tokens of all of them."""
    turns, said = list[Turn](), 0
    extra = draw.geometric(1 / (source.turns_mean - TURNS_MIN + 1)) - 1
    for _ in range(min(TURNS_MIN + int(extra), TURNS_MAX)):
        asked, answered = (_length(each, draw) for each in (source.asked, source.answered))
        if said + asked > CONTEXT_MAX:
            break
        turns.append(Turn(prompt_tokens=said + asked, output_tokens=answered))
        said += asked + answered
    return turns, said


def _length(drawn: Draw, draw: np.random.Generator) -> int:
    """Conversations with longer messages are left out, so a message is drawn until it fits."""
    while (tokens := drawn(draw)) > TOKENS_MAX:
        pass
    return max(TOKENS_MIN, int(tokens))


def _run(task: tuple[str, Config, PpdTable | None, float, int, bool]) -> Served:
    source, config, table, load, seed, quick = task
    spec = Spec(
        config=config,
        workload=WORKLOADS[0],
        loads_per_s=(load,),
        seed=seed,
        table=table if config.policy == "table" else None,
        weights=EQUAL,
        conversations_max=CONVERSATIONS_MAX,
    )
    count = QUICK_CONVERSATIONS if quick else CONVERSATIONS
    held = conversations([SOURCES[source]], load, count, spec.setup.block_tokens, seed)
    cluster = point.served(spec, held)
    done = [each for each in cluster.clients.served if each.completed]
    later = [each for each in done if each.turn > 1]
    turns = sum(len(each.turns) for each in held)
    pressure = point.pressure(cluster)
    return Served(
        source=source,
        config=config.name,
        load_per_s=load,
        turns=turns,
        failed=turns - len(done),
        latency=_mean([each.took_ms for each in done]),
        later_ttft_p50=float(np.median([e.decode_ttft_ms for e in later])) if later else 0.0,
        tpot=_mean([each.tpot_ms for each in done]),
        local_share=_mean([each.mode is Mode.LOCAL for each in later]),
        kv_bytes=sum(cluster.links.moved_bytes.values()),
        buffered_bytes=pressure["buffered_bytes"],
        crashed=pressure["crashed"],
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def changes(rows: Sequence[Served]) -> list[Change]:
    """Every configuration but plain x=0 beside it."""
    found = []
    for source, config in dict.fromkeys((row.source, row.config) for row in rows):
        pools = config.partition(" ")[0]
        base = static(pools, "0", plain=True).name
        if config == base:
            continue
        x0, mine = (
            [row for row in rows if (row.source, row.config) == (source, name)]
            for name in (base, config)
        )
        found.append(_change(x0, mine))
    return found


def _change(x0: Sequence[Served], mine: Sequence[Served]) -> Change:
    whole = [(a, b) for a, b in zip(x0, mine, strict=True) if not a.failed and not b.failed]
    latency = [100 * (b.latency / a.latency - 1) for a, b in whole]
    moved = [100 * (b.kv_bytes / a.kv_bytes - 1) for a, b in whole]
    return Change(
        source=mine[0].source,
        config=mine[0].config,
        latency=(min(latency), max(latency)) if latency else (0.0, 0.0),
        kv_bytes=float(np.median(moved)) if moved else 0.0,
        degraded=_degraded(mine),
        degraded_x0=_degraded(x0),
        loads=len(mine),
    )


def _degraded(rows: Sequence[Served]) -> int:
    return sum(row.failed > (1 - ppd_paper.SUCCESS_MIN) * row.turns for row in rows)
