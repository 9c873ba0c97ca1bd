"""Measurements of prefill, decode and search against batch size, in `measured.json`.

`measure.py` writes the file, on the machine that it names.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """Points of one stage: batch size, and work per second in `unit`."""

    stage: str
    what: str  # members of a batch
    unit: str
    points: Sequence[tuple[float, float]]
    about: str  # machine, engine, command, seed, date


def read(path: Path = FILE) -> list[StageMeasurement]:
    """Return all measured stages; an empty list if there is no file."""
    if not path.exists():
        return []
    return [
        StageMeasurement(
            **{**stage, "points": [(batch, value) for batch, value in stage["points"]]}
        )
        for stage in json.loads(path.read_text())["stages"]
    ]
