"""A fleet as somebody sees it who watches, from records at hand."""

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from infra.cli.operate.status import _view
from schemas.codec import Codec
from schemas.fleet import FleetView
from schemas.records import (
    Capability,
    Orchestration,
    Role,
)
from streams.log.clock import wall_ms
from tests.streams.builders import beat, registration

CODEC = Codec()


class Watch:
    """A fleet at hand."""

    def __init__(self) -> None:
        self.view = FleetView()


def fleet() -> Any:
    """Two workers that can do the same, and one that takes two roles on two cards."""
    can = Capability(
        model="tiny",
        engine="sim",
        engine_id="e",
        block_size=16,
        max_model_len=512,
        running_max=8,
        orchestrations=[Orchestration.PREFILL_FIRST, Orchestration.CONCURRENT],
    )
    watch, now_ms = Watch(), wall_ms() + 60_000  # heard late, so that no stall makes them lost
    both = replace(can, tensor_parallel=2, orchestrations=[Orchestration.PREFILL_FIRST])
    for number, (name, roles, capability) in enumerate(
        (
            ("prefill-0", (Role.PREFILL,), can),
            ("prefill-1", (Role.PREFILL,), can),
            ("both-0", (Role.PREFILL, Role.DECODE), both),
        )
    ):
        record = registration(name, *roles, partition=number, capability=capability)
        watch.view.apply(record, 2 * number, now_ms)
        granted = dict.fromkeys(roles, 4)
        watch.view.apply(beat(name, 1, granted, at_ms=now_ms), 2 * number + 1, now_ms)
    return watch


def status_lines(rows: list[dict[str, Any]], columns: int) -> list[str]:
    """The lines of `trivium status`, without what aligns them."""
    out = io.StringIO()
    Console(file=out, width=columns).print(_view(rows))
    return [" ".join(row.split()) for row in out.getvalue().splitlines()]
