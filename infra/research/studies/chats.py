"""Figure 4: conversations like ShareGPT's and WildChat's, at 12 loads, with equal weights.

The authors' clients have 500 real conversations; here these are drawn from distributions, or read
from files (`infra/research/paper/conversations.py`). Dynamic PPD is the authors' table behind their
proxy, computed from the grid's plain points.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import RATIOS, WORKLOADS, Config, static
from infra.planning.point import Spec
from infra.planning.runs import Runner
from infra.research.paper import ppd_paper
from infra.research.paper.conversations import ConversationSource, conversations
from infra.research.studies.served import ServedRow, serve
from streams.core.placement.ppd_table import PpdTable

LOADS_PER_S = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 20.0)
QUICK_LOADS_PER_S = (2.0, 8.0)
CONVERSATIONS, QUICK_CONVERSATIONS = 200, 50
EQUAL = (1.0, 1.0)  # weights of TTFT and TPOT
Tables = dict[str, PpdTable]  # by pools


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChange:
    """The changes of one configuration from plain x=0 of the same pools and source, in percent."""

    source: str
    config: str
    latency: tuple[float, float]  # least and most, over loads at which neither loses a request
    kv_bytes: float  # median over the same loads
    degraded: int  # loads at which less than `SUCCESS_MIN` of the turns completed
    degraded_x0: int
    loads: int


def serve_chats(
    runner: Runner, plain: Tables, sources: Sequence[ConversationSource], seed: int, *, quick: bool
) -> list[ServedRow]:
    """Run plain x=0, dynamic PPD and `learned`, for every source, ratio and load."""
    count = QUICK_CONVERSATIONS if quick else CONVERSATIONS
    tasks = [
        (source, chat_spec(config, plain.get(pools), load, seed, EQUAL), count)
        for source in sources
        for pools in RATIOS
        for config in (
            static(pools, "0", plain=True),
            Config(pools=pools, policy="table", plain=True),
            Config(pools=pools, policy="learned"),
        )
        for load in (QUICK_LOADS_PER_S if quick else LOADS_PER_S)
    ]
    return runner.map("figure 4", _run, tasks)


def chat_spec(
    config: Config, table: PpdTable | None, load_per_s: float, seed: int,
    weights: tuple[float, float],
) -> Spec:  # fmt: skip
    """Return a spec for given conversations; its workload is not used."""
    return Spec(
        config=config,
        workload=WORKLOADS[0],
        loads_per_s=(load_per_s,),
        seed=seed,
        table=table if config.policy == "table" else None,
        weights=weights,
    )


def _run(task: tuple[ConversationSource, Spec, int]) -> ServedRow:
    source, spec, count = task
    (load,) = spec.loads_per_s
    chats = conversations([source], load, count, spec.setup.block_tokens, spec.seed)
    return serve(source.name, spec, chats, load_per_s=load)


def changes(rows: Sequence[ServedRow]) -> list[ChatChange]:
    """Compare every other configuration with plain x=0."""
    change_rows = []
    for source, config in dict.fromkeys((row.about, row.config) for row in rows):
        base = static(config.partition(" ")[0], "0", plain=True).name
        if config != base:
            x0, config_rows = (
                [row for row in rows if (row.about, row.config) == (source, name)]
                for name in (base, config)
            )
            change_rows.append(_change(x0, config_rows))
    return change_rows


def _change(x0: Sequence[ServedRow], config_rows: Sequence[ServedRow]) -> ChatChange:
    pairs = [(a, b) for a, b in zip(x0, config_rows, strict=True) if not a.failed and not b.failed]
    latency = [100 * (b.latency / a.latency - 1) for a, b in pairs]
    kv_changes = [100 * (b.kv_bytes / a.kv_bytes - 1) for a, b in pairs]
    return ChatChange(
        source=config_rows[0].about,
        config=config_rows[0].config,
        latency=(min(latency), max(latency)) if latency else (0.0, 0.0),
        kv_bytes=float(np.median(kv_changes)) if kv_changes else 0.0,
        degraded=_degraded(config_rows),
        degraded_x0=_degraded(x0),
        loads=len(config_rows),
    )


def _degraded(rows: Sequence[ServedRow]) -> int:
    return sum(row.failed > (1 - ppd_paper.SUCCESS_MIN) * row.requests for row in rows)
