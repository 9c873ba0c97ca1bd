"""Measures PPD's table on a live cluster: each kind of turn with x=0 and x=1, at each load.

A load is a number of concurrent conversations; the router's own load figure comes from `decisions`.
A request cannot ask for local or remote, but its weights decide if the table has one cell with
equal gain and loss, the probe: with weight on TTFT alone a turn is local, with weight on TPOT alone
it is remote. So an operator makes a cluster measurable by starting its routers with the policy
`table` and that file. The placements that answers report are checked.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

from infra.planning.live_conversations import LiveLoad, LiveTurn, hold_at
from infra.planning.plan_table import TurnMeasurement, table_from
from infra.stack.configuration import Settings
from infra.story.record_finder import CLOCKS_MS, LogFinder, Window
from schemas.errors import ConfigError
from schemas.records import Decision, DecisionKind
from schemas.settings import LogSettings
from streams.core.placement.ppd_table import PpdCell, PpdTable
from streams.log.clock import wall_ms
from streams.log.registry import make_codec

PROBE = PpdTable(
    {"context_tokens": [], "new_tokens": [], "answer_tokens": [], "load": []},
    [PpdCell(bin=(0, 0, 0, 0), gain_ttft=1.0, loss_tpot=1.0, samples=1)],
)
_WEIGHTS = {"remote": "tpot=1", "local": "ttft=1"}
_OBEYED = 0.9  # least share of later turns placed as asked: a full worker makes a local turn remote

FIRST_WORDS = (40, 300)
NEW_WORDS = (8, 60, 240)
ANSWER_TOKENS = (8, 64)
STREAMS = (2, 8)
_SESSIONS = "plan"  # prefix of session ids


def write(table: PpdTable, path: Path) -> None:
    """Write the table as JSON in the form that routers read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table.to_dict(), indent=1) + "\n")


def with_probe_table(settings: Settings, path: Path) -> Settings:
    """Return the settings of a measurable cluster, with the probe table in a file."""
    return replace(settings, router=replace(settings.router, policy="table", table=str(path)))


def kinds(*, conversations: int, streams: Sequence[int], seed: int, quick: bool) -> list[LiveLoad]:
    """Return two-turn conversations of each kind, for each number of streams (at least that many).

    With `quick`: the shortest and the longest kind, and the least of `STREAMS` unless `streams` has
    some.
    """
    streams = sorted({*streams}) or STREAMS[: 1 if quick else None]
    lengths = [
        (first, new, answer)
        for first in FIRST_WORDS
        for new in NEW_WORDS
        for answer in ANSWER_TOKENS
    ]
    return [
        LiveLoad(
            name=f"{first}+{new}/{answer} of {at_once}",
            conversations=max(conversations, at_once),
            turns=2,
            streams=at_once,
            first_words=first,
            first_tokens=ANSWER_TOKENS[0],
            words=new,
            tokens=answer,
            seed=seed,
        )
        for first, new, answer in (lengths[:: len(lengths) - 1] if quick else lengths)
        for at_once in streams
    ]


async def served_model(url: str) -> str:
    """Return the model that a gateway serves; raises ConfigError if none answers."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ConfigError(
            f"plan: expected a gateway at {url}, found {error!r}; start one with `trivium up`, or "
            "name its address with --url"
        ) from error


async def measure(
    url: str, log: LogSettings, loads: Sequence[LiveLoad], on_run_end: Callable[[], None]
) -> PpdTable:
    """Measure a cluster's table from these loads; `on_run_end` is called after each run."""
    model, measurements = await served_model(url), []
    for load in loads:
        turns, began_ms = {}, wall_ms()
        for mode, weights in _WEIGHTS.items():
            chats = await hold_at(url, model, load, f"{load.name} {mode}", _SESSIONS, weights)
            turns[mode] = [turn for chat in chats for turn in chat]
            check(mode, turns[mode])
            on_run_end()
        placement_loads = await _placements(log, began_ms)
        means = [mean_router_load(run_turns, placement_loads, log) for run_turns in turns.values()]
        measurements.append(
            _measurement_of(load, turns["remote"], turns["local"], float(np.mean(means)))
        )
    return table_of(loads, measurements)


def table_of(loads: Sequence[LiveLoad], measurements: Sequence[TurnMeasurement]) -> PpdTable:
    """Return the table of the loads' measurements; the same number of words counts as one
    length."""
    contexts = _median_tokens(
        [load.first_words for load in loads], [row.context_tokens for row in measurements]
    )
    news = _median_tokens([load.words for load in loads], [row.new_tokens for row in measurements])
    rows = [
        replace(row, context_tokens=context, new_tokens=new)
        for row, context, new in zip(measurements, contexts, news, strict=True)
    ]
    return table_from(rows, len({load.streams for load in loads}))


def _median_tokens(words: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return for each load the median tokens of all loads with as many words."""
    pairs = list(zip(words, tokens, strict=True))
    return [int(np.median([count for same, count in pairs if same == length])) for length in words]


async def _placements(log: LogSettings, since_ms: int) -> dict[str, float]:
    """Return the router's load at the first placement of each request since a time, by request
    id."""
    finder = LogFinder(log, await asyncio.to_thread(make_codec, log))
    window = Window(since_ms - CLOCKS_MS, wall_ms() + CLOCKS_MS)
    decisions = await finder.find("decisions", range(log.session_partitions), _SESSIONS, window)
    return {
        decision.request_id: decision.load
        for decision in decisions
        if isinstance(decision, Decision) and decision.kind is DecisionKind.PLACE
    }


def mean_router_load(
    turns: Sequence[LiveTurn], placement_loads: Mapping[str, float], log: LogSettings
) -> float:
    """Return the mean load at the later turns' placements; raises ConfigError if the log lacks
    some."""
    later = [turn.request_id for turn in turns if turn.number > 1]
    hits = [placement_loads[request_id] for request_id in later if request_id in placement_loads]
    if len(hits) < len(later):
        raise ConfigError(
            f"plan: expected {len(later)} placements on {log.topic_prefix}decisions at "
            f"{log.bootstrap}, found {len(hits)}; name the cluster's log with --bootstrap and, for "
            "its log.topic_prefix and partitions, --config"
        )
    return float(np.mean(hits))


def check(mode: str, turns: Sequence[LiveTurn]) -> None:
    """Raise ConfigError if later turns were not placed as their weights asked."""
    later = [turn.mode for turn in turns if turn.number > 1]
    if later.count(mode) < _OBEYED * len(later):
        raise ConfigError(
            f"plan: expected {mode} placements with x-trivium-weights: {_WEIGHTS[mode]}, found "
            f'{later.count(mode)} of {len(later)}; start the routers with `policy = "table"` and '
            "the table that `trivium plan ppd --probe` writes, with a prefill and a decode worker"
        )


def _measurement_of(
    load: LiveLoad, remote: Sequence[LiveTurn], local: Sequence[LiveTurn], router_load: float
) -> TurnMeasurement:
    def median(turns: Sequence[LiveTurn], figure: Callable[[LiveTurn], float], first: int) -> float:
        return float(np.median([figure(turn) for turn in turns if turn.number >= first]))

    first = int(np.median([turn.prompt_tokens for turn in remote if turn.number == 1]))
    prompt = int(median(remote, lambda turn: turn.prompt_tokens, 2))
    context = first + load.first_tokens
    ttft, tpot = (
        [median(turns, figure, 2) for turns in (remote, local)]
        for figure in (lambda turn: turn.ttft_ms, lambda turn: turn.tpot_ms)
    )
    return TurnMeasurement(
        context_tokens=context,
        new_tokens=max(1, prompt - context),
        answer_tokens=load.tokens,
        load=router_load,
        gain_ttft=1 - ttft[1] / ttft[0],
        loss_tpot=tpot[1] / tpot[0] - 1,
        samples=2 * load.conversations,
    )
