"""PPD's table from a live cluster: each kind of turn with x=0 and with x=1, through its gateway.

Nothing in a request says local or remote, but its weights do where the table has one cell with
equal gain and loss, the probe: only the time to first token counts, local; only the time per token,
remote. So the operator lets a cluster be measured by starting its routers with the policy `table`
and that file. What answers say about their placement is checked.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

from infra.config import Settings
from infra.evaluate.conversations import Load, Turn, hold_at
from infra.evaluate.planning import Measured, table_from
from schemas.errors import ConfigError
from streams.core.table import Cell, Table

PROBE = Table(
    {"context_tokens": [], "new_tokens": [], "answer_tokens": [], "load": []},
    [Cell(bin=(0, 0, 0, 0), gain_ttft=1.0, loss_tpot=1.0, samples=1)],
)
_WAYS = {"remote": "tpot=1", "local": "ttft=1"}
_OBEYED = 0.9  # of the later turns at least: a full worker makes a local turn remote

FIRST_WORDS = (40, 300)
NEW_WORDS = (8, 60, 240)
ANSWER_TOKENS = (8, 64)


def write(table: Table, path: Path) -> None:
    """As routers read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table.to_dict(), indent=1) + "\n")


def probed(settings: Settings, path: Path) -> Settings:
    """Settings of a cluster that can be measured, with the probe in a file."""
    return replace(settings, router=replace(settings.router, policy="table", table=str(path)))


def kinds(*, conversations: int, streams: int, seed: int, quick: bool) -> list[Load]:
    """Two-turn conversations of each kind; quick: the shortest and the longest."""
    found = [
        Load(
            name=f"{first}+{new}/{answer}",
            conversations=conversations,
            turns=2,
            streams=streams,
            first_words=first,
            first_tokens=ANSWER_TOKENS[0],
            words=new,
            tokens=answer,
            seed=seed,
        )
        for first in FIRST_WORDS
        for new in NEW_WORDS
        for answer in ANSWER_TOKENS
    ]
    return [found[0], found[-1]] if quick else found


async def served_model(url: str) -> str:
    """The model that a gateway serves; ConfigError where none answers."""
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


async def measure(url: str, loads: Sequence[Load], done: Callable[[], None]) -> Table:
    """The table of a cluster at the load that the conversations make; `done` after each run."""
    model, found = await served_model(url), []
    for load in loads:
        turns = {}
        for mode, weights in _WAYS.items():
            held = await hold_at(url, model, load, f"{load.name} {mode}", "plan", weights)
            turns[mode] = [turn for each in held for turn in each]
            check(mode, turns[mode])
            done()
        found.append(_measured(load, turns["remote"], turns["local"]))
    return table_from(found)


def check(mode: str, turns: Sequence[Turn]) -> None:
    """ConfigError where later turns were not placed as their weights asked."""
    later = [turn.mode for turn in turns if turn.number > 1]
    if later.count(mode) < _OBEYED * len(later):
        raise ConfigError(
            f"plan: expected {mode} placements with x-trivium-weights: {_WAYS[mode]}, found "
            f'{later.count(mode)} of {len(later)}; start the routers with `policy = "table"` and '
            "the table that `trivium plan probe` writes, with a prefill and a decode worker"
        )


def _measured(load: Load, remote: Sequence[Turn], local: Sequence[Turn]) -> Measured:
    def median(turns: Sequence[Turn], figure: Callable[[Turn], float], first: int) -> float:
        return float(np.median([figure(turn) for turn in turns if turn.number >= first]))

    first = int(np.median([turn.prompt_tokens for turn in remote if turn.number == 1]))
    prompt = int(median(remote, lambda turn: turn.prompt_tokens, 2))
    context = first + load.first_tokens
    ttft, tpot = (
        [median(turns, figure, 2) for turns in (remote, local)]
        for figure in (lambda turn: turn.ttft_ms, lambda turn: turn.tpot_ms)
    )
    return Measured(
        context_tokens=context,
        new_tokens=max(1, prompt - context),
        answer_tokens=load.tokens,
        load=0.0,
        gain_ttft=1 - ttft[1] / ttft[0],
        loss_tpot=tpot[1] / tpot[0] - 1,
        samples=2 * load.conversations,
    )
