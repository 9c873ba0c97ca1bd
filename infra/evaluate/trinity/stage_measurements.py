"""What was measured of prefill, decode and search against batch size: `measured.json`.

`measure.py` writes it, on the machine that it names.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """Points of one stage: batch size, and how much was done in a second."""

    stage: str
    what: str  # what a batch is made of
    unit: str
    points: Sequence[tuple[float, float]]
    about: str  # machine, engine, command, seed, date


def read(path: Path = FILE) -> list[StageMeasurement]:
    """All stages that were measured; none where there is no file."""
    if not path.exists():
        return []
    return [
        StageMeasurement(
            **{**stage, "points": [(batch, value) for batch, value in stage["points"]]}
        )
        for stage in json.loads(path.read_text())["stages"]
    ]
