"""Table 4: which configurations lose requests, in the paper and here, and why.

The authors' raw results show how requests fail: a decode worker stops for good within one step, and
every later request times out. Until then it answers as fast as at loads that it survives, so the
cause is no queue. Only plain disaggregation accumulates KV that the connector has received and
keeps outside the engine's memory until each request ends. `ppd.jinja` says all this with figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.research.paper.paper_tables import Failures
from infra.research.studies.served import ServedRow

_PLAIN = "x=0 plain"
_NEAR = f"2P2D {_PLAIN}"  # published as losing requests, at loads that it survives here


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCauses:
    """What the model has near its limits, and which runs lose requests."""

    longest_ms: float  # of a completed request
    memory_share: float  # most of a worker's KV memory
    x1_bytes: int  # most in a connector's buffer with plain x=1
    x0_2p2d_bytes: int  # with plain x=0 of 2P2D on the grid
    lossless_2p2d: bool  # whether that completes the grid
    first_losses: list[str]  # drawn conversations: from which load on
    long_losses: list[str]  # of plain x=0 of 2P2D, by number of turns
    long_losses_x1: int  # of plain x=1 of 2P2D


def trends(grid: Sequence[Failures]) -> dict[str, bool]:
    """Return whether each published trend is found on the grid."""
    lossy = _lossy(grid)
    return {
        "plain 3P1D loses requests": f"3P1D {_PLAIN}" in lossy,
        "plain 2P2D loses requests": _NEAR in lossy,
        "plain 1P3D completes everything": f"1P3D {_PLAIN}" not in lossy,
        "x=1 loses requests too": any(" x=1 plain" in name for name in lossy),
        "4R completes everything": "4R" not in lossy,
        "learned and table complete everything": not any(
            name.endswith((" learned", " table")) for name in lossy
        ),
    }


def causes(
    grid: Sequence[Failures], real: Sequence[ServedRow], lengths: Sequence[ServedRow]
) -> LossCauses:
    """Return what explains the losses on the grid and of drawn and of longer conversations."""
    first: dict[tuple[str, str], float] = {}
    for row in sorted(real, key=lambda row: row.load_per_s):
        if row.failed and row.config.endswith(_PLAIN):
            first.setdefault((row.about, row.config), row.load_per_s)
    peaks = [(row.config, row.buffered_bytes) for row in grid]
    peaks += [(row.config, row.buffered_bytes) for row in real]
    lossy_lengths = [row for row in lengths if row.config == _NEAR and row.failed]
    return LossCauses(
        longest_ms=max(row.longest_ms for row in grid),
        memory_share=max(row.memory_share for row in grid),
        x1_bytes=max(peak for name, peak in peaks if name.endswith(" x=1 plain")),
        x0_2p2d_bytes=max(row.buffered_bytes for row in grid if row.config == _NEAR),
        lossless_2p2d=_NEAR not in _lossy(grid),
        first_losses=[f"{source} {name} from {at:g}/s" for (source, name), at in first.items()],
        long_losses=[
            f"{row.failed} of {row.requests} at {row.turns} turns" for row in lossy_lengths
        ],
        long_losses_x1=sum(row.failed for row in lengths if row.config == "2P2D x=1 plain"),
    )


def _lossy(grid: Sequence[Failures]) -> set[str]:
    return {row.config for row in grid if any(row.percent.values())}
