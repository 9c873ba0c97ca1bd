"""Table 4 in words: which configurations lose requests, in the paper and here, and why.

The authors' raw results show how requests fail: a decode worker stops for good within one step, and
every later request times out. Until then it answers as fast as at loads that it survives, so the
cause is no queue. Only plain disaggregation accumulates KV that the connector has received and
keeps outside the engine's memory until each request ends.
"""

from collections.abc import Iterable, Sequence

from infra.planning import authors_serving
from infra.planning.grid import CONVERSATIONS_MAX
from infra.research.paper import conversations, ppd_paper
from infra.research.paper.paper_tables import Failures
from infra.research.studies.chats import ChatResult
from infra.research.studies.many_turns import TurnCountResult
from infra.simulator.machine.latency import LLAMA_8B

_PLAIN = "x=0 plain"


def trends(
    grid: Sequence[Failures], real: Sequence[ChatResult], lengths: Sequence[TurnCountResult]
) -> tuple[dict[str, bool], list[str]]:
    """Return whether each published trend is found on the grid, and explanations with figures.

    Some of the figures are from longer conversations.
    """
    lossy_configs = {row.config for row in grid if any(row.percent.values())}
    checks = {
        "plain 3P1D loses requests": f"3P1D {_PLAIN}" in lossy_configs,
        "plain 2P2D loses requests": f"2P2D {_PLAIN}" in lossy_configs,
        "plain 1P3D completes everything": f"1P3D {_PLAIN}" not in lossy_configs,
        "x=1 loses requests too": any(" x=1 plain" in name for name in lossy_configs),
        "4R completes everything": "4R" not in lossy_configs,
        "learned and table complete everything": not any(
            name.endswith((" learned", " table")) for name in lossy_configs
        ),
    }
    return checks, [_how(grid, real), _when(real), *_near(grid, real, lengths, lossy_configs)]


def _how(grid: Sequence[Failures], real: Sequence[ChatResult]) -> str:
    longest = max(row.longest_ms for row in grid)
    memory = max(row.memory_share for row in grid)
    return (
        "How requests fail in the model: in the authors' connector a request's KV lies in a "
        f"buffer of {authors_serving.RECEIVE_BUFFER_BYTES / 1e9:.0f} GB beside the engine's memory "
        "until the request ends; with x=0 that is the whole context of every running request, and "
        "a worker whose buffer overflows dies. With x=1 later turns bring no KV: at most "
        f"{_buffered(grid, real, ' x=1 plain') / 1e9:.1f} GB. Nothing else fails: the longest "
        f"completed request takes {longest / 1e3:.1f} s of 30 s, and requests hold at most "
        f"{memory:.0%} of a worker's KV memory. So table 4 is contradicted where it says that x=1 "
        "loses requests as well, in the same order and fewer: that has a cause which is not in "
        "this model. Trivium's own transfers go straight into the "
        "engine's blocks, so its x=0, `learned` and `table` have no such buffer."
    )


def _when(real: Sequence[ChatResult]) -> str:
    grid = ", ".join(
        f"{share:g} % at {load:g}/s" for load, share in ppd_paper.GRID_3P1D_PLAIN.items()
    )
    return (
        "In the authors' results plain 3P1D stops where this model says: of `large, long gen` "
        f"{grid} succeed, after 50 first turns when about 39 second turns (10.6 GB of KV) are "
        "under way. They count what follows as failed too, until somebody restarts the worker; "
        f"here each point starts anew, so shares are lower. {_longer(real)}"
    )


def _longer(real: Sequence[ChatResult]) -> str:
    """Describe from which loads on drawn conversations lose requests."""
    first: dict[tuple[str, str], float] = {}
    for row in sorted(real, key=lambda row: row.load_per_s):
        if row.failed and row.config.endswith(_PLAIN):
            first.setdefault((row.source, row.config), row.load_per_s)
    if not first:
        return ""
    losses = ", ".join(f"{source} {name} from {load:g}/s" for (source, name), load in first.items())
    return f"Drawn conversations lose requests, too: {losses}."


def _near(
    grid: Sequence[Failures],
    real: Sequence[ChatResult],
    lengths: Sequence[TurnCountResult],
    lossy_configs: Iterable[str],
) -> list[str]:
    name = f"2P2D {_PLAIN}"
    if name in lossy_configs:
        return []
    peak_bytes, limit = _buffered(grid, [], name), authors_serving.RECEIVE_BUFFER_BYTES
    degraded, of = ppd_paper.DEGRADED_2P2D
    tokens = 2 * conversations.ASKED_TOKENS + conversations.ANSWERED_TOKENS
    second_turns = CONVERSATIONS_MAX * tokens * LLAMA_8B.kv_bytes_per_token
    return [
        f"Plain 2P2D, published as degraded at {degraded} of {of} loads, completes the grid here: "
        f"dealt by hash, its decode workers hold at most {peak_bytes / 1e9:.1f} GB of "
        f"{limit / 1e9:.0f}. {_long(name, lengths)}In the authors' raw results that is not what "
        "ends it either. 2P2D completes the grid's longest contexts at 20/s. On ShareGPT at 4/s "
        "all 50 connections are taken (first turns wait 14 s for one) and all 2 204 turns succeed; "
        "at 8/s, right after it on the same servers, serving stops after 78 turns, when even "
        f"{CONVERSATIONS_MAX} second turns of mean length on one worker are "
        f"{second_turns / 1e9:.1f} GB. WildChat likewise: 2 056 turns at 4/s, then the end after "
        "1 031 at 8/s. What adds up over a server's life, and is gone when it is started again, is "
        "not in this model, where each point has servers of its own."
    ]


def _long(name: str, lengths: Sequence[TurnCountResult]) -> str:
    lossy_rows = [row for row in lengths if row.config == name and row.failed]
    if not lossy_rows:
        return ""
    full = sum(row.failed for row in lengths if row.config == name.replace("x=0", "x=1"))
    losses = ", ".join(f"{row.failed} of {row.requests} at {row.turns} turns" for row in lossy_rows)
    return (
        f"Longer conversations overflow the worker that gets more than its half: {losses} are lost "
        f"(with other seeds less, or none), with x=1 {full}. "
    )


def _buffered(grid: Sequence[Failures], real: Sequence[ChatResult], ending: str) -> int:
    config_bytes = [(row.config, row.buffered_bytes) for row in grid]
    config_bytes += [(row.config, row.buffered_bytes) for row in real]
    return max(peak_bytes for name, peak_bytes in config_bytes if name.endswith(ending))
