"""Implements `trivium replay` with faults or `--simulate`: reruns requests on simulated workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from infra.terminal.output import print_json, stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.simulator.shape import ClusterShape
    from infra.traces.trace import Trace
    from streams.config import RouterSettings

_AS_WAS, _OTHERWISE = "as it was", "otherwise"


def simulate(
    file: Path,
    overrides: Mapping[str, str],
    faults: Sequence[tuple[str, str]],
    *,
    pools: str,
    gpu: str,
    model: str,
    as_json: bool,
) -> None:
    """Simulate the file's requests, and again with faults and settings if there are any."""
    from dataclasses import replace

    from infra.evaluate.replays.faults import faults_of
    from infra.evaluate.replays.whatif import later_ms, replay_trace, setup_of
    from infra.planning.hardware import gpu_named, model_named
    from infra.replay.redeciding import with_overrides

    setup = replace(setup_of(), gpu=gpu_named(gpu), model=model_named(model))
    trace, shape, settings = _read(file, pools, setup.block_tokens)
    names = [name for name, _ in shape.roles()]
    struck = [fault for kind, text in faults for fault in faults_of(kind, text, names)]
    changed_settings = with_overrides(settings, overrides) if overrides else settings
    runs = {_AS_WAS: replay_trace(trace, shape, settings, setup=setup)}
    if struck or overrides:
        runs[_OTHERWISE] = replay_trace(trace, shape, changed_settings, struck, setup=setup)
    late = later_ms(*runs.values()) if len(runs) > 1 else []
    figures = {name: run.figures() for name, run in runs.items()}
    if as_json:
        print_json({"workers": names, "runs": figures, "later_ms": late})
        return
    print(f"{len(trace.arrivals):,} requests at {shape.name}: {', '.join(names)}")
    _show(figures)
    if late:
        half, worst = np.percentile(late, 50), late[-1]
        print(f"{len(late):,} requests took longer by over 100 ms: p50 {half:,.0f} ms, "
              f"at most {worst:,.0f} ms")  # fmt: skip


def _read(
    file: Path, pools: str, block_tokens: int
) -> "tuple[Trace, ClusterShape, RouterSettings]":
    from infra.evaluate.replays.deployment import deployment
    from infra.simulator.shape import ClusterShape
    from infra.traces.formats import is_recording, read
    from infra.traces.from_log import read_recording
    from streams.config import RouterSettings

    try:
        recorded = is_recording(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    trace = read_recording(file, block_tokens) if recorded else read(file)
    if not trace.arrivals:
        raise ConfigError(f"{file}: expected requests that have ended, found none")
    if not pools:
        if not recorded:
            raise ConfigError("--pools: expected workers such as 2P2D: a trace names none")
        return trace, *deployment(file)
    shape = ClusterShape.parse(pools)
    if shape.name != pools:
        raise ConfigError(f"--pools: expected workers such as 2P2D, 1P1D2R or 4R, found {pools!r}")
    return trace, shape, deployment(file)[1] if recorded else RouterSettings()


def _show(figures: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("", *figures, box=None)
    rows = {row: None for column in figures.values() for row in column}
    for row in rows:
        table.add_row(row, *(f"{column.get(row, 0):,}" for column in figures.values()))
    stdout_console().print(table)
