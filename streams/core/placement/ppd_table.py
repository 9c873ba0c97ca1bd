"""PPD's table: the measured gain and cost of local prefill for each kind of turn.

`trivium plan ppd` makes it: it runs each kind of turn with every prompt remote and with every
prompt local (PPD, algorithm 1, phase 1). `streams/core/placement/policies/table.py` looks up each
request (phase 2). Callers parse the JSON; this module takes and returns dictionaries.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from typing import Any

from schemas.errors import ConfigError

AXES = ("context_tokens", "new_tokens", "answer_tokens", "load")
BINS_MAX = 100_000  # of all axes together; bounds the cache of looked-up bins

Bin = tuple[int, int, int, int]  # one number per axis


@dataclass(frozen=True, slots=True, kw_only=True)
class PpdCell:
    """The measurements of one bin, as shares of the remote figures."""

    bin: Bin
    gain_ttft: float  # (remote - local) / remote
    loss_tpot: float  # (local - remote) / remote
    samples: int

    def score(self, w_ttft: float, w_tpot: float) -> float:
        """Return the weighted gain of local over remote; above 0, local wins."""
        return w_ttft * self.gain_ttft - w_tpot * self.loss_tpot


class PpdTable:
    """Cells by bin. An axis with n rising edges has n + 1 bins; an edge belongs to the bin above.

    `load` is that of `streams/core/placement/selection.py`. Raises ConfigError for invalid input.
    """

    def __init__(self, edges: Mapping[str, Sequence[float]], cells: Sequence[PpdCell]) -> None:
        self.edges = {axis: _edges(axis, edges) for axis in AXES}
        sizes = [len(self.edges[axis]) + 1 for axis in AXES]
        if prod(sizes) > BINS_MAX:
            raise ConfigError(f"table: expected at most {BINS_MAX} bins, found {prod(sizes)}")
        self.cells: dict[Bin, PpdCell] = {}
        for cell in cells:
            fits = all(0 <= at < size for at, size in zip(cell.bin, sizes, strict=True))
            if not fits or cell.bin in self.cells:
                raise ConfigError(
                    f"table: expected each bin below {sizes} once, found {list(cell.bin)}"
                )
            self.cells[cell.bin] = cell
        self._nearest_cells: dict[Bin, PpdCell | None] = {}

    def bin_of(
        self, context_tokens: float, new_tokens: float, answer_tokens: float, load: float
    ) -> Bin:
        """Return the bin of a turn, for filling the table and for looking it up."""
        edges = self.edges
        return (
            bisect_right(edges["context_tokens"], context_tokens),
            bisect_right(edges["new_tokens"], new_tokens),
            bisect_right(edges["answer_tokens"], answer_tokens),
            bisect_right(edges["load"], load),
        )

    def find(self, at: Bin) -> PpdCell | None:
        """Return the cell of a bin, or else the nearest one of the same context bin, if any."""
        if at not in self._nearest_cells:
            near = [cell for cell in self.cells.values() if cell.bin[0] == at[0]]
            near.sort(key=lambda cell: (_distance(cell.bin, at), cell.bin))
            self._nearest_cells[at] = near[0] if near else None
        return self._nearest_cells[at]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "PpdTable":
        """Build the table from the result of `to_dict`. Raise ConfigError for invalid content."""
        try:
            cells = [
                PpdCell(
                    bin=(int(c["bin"][0]), int(c["bin"][1]), int(c["bin"][2]), int(c["bin"][3])),
                    gain_ttft=_finite(c["gain_ttft"]),
                    loss_tpot=_finite(c["loss_tpot"]),
                    samples=int(c["samples"]),
                )
                for c in content["cells"]
            ]
            return cls(content["edges"], cells)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"table: expected edges of {', '.join(AXES)} and cells of bin, gain_ttft, "
                f"loss_tpot and samples, found {error!r}; make it again with `trivium plan ppd`"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a dictionary for JSON."""
        cells = [asdict(self.cells[at]) for at in sorted(self.cells)]
        return {"edges": {axis: list(self.edges[axis]) for axis in AXES}, "cells": cells}


def _edges(axis: str, edges: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    axis_edges = tuple(_finite(edge) for edge in edges[axis])
    if any(low >= high for low, high in zip(axis_edges, axis_edges[1:], strict=False)):
        raise ConfigError(f"table: expected rising edges of {axis}, found {list(axis_edges)}")
    return axis_edges


def _finite(value: Any) -> float:
    if not isfinite(float(value)):
        raise ValueError(f"{value} is not finite")
    return float(value)


def _distance(first: Bin, second: Bin) -> int:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))
