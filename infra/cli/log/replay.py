"""Implements `trivium replay`: decides recorded traffic again, or simulates it, and compares."""

import asyncio
import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.log.explain import duration_ms
from infra.cli.options import (
    AsJson,
    Bootstrap,
    Config,
    in_panel,
    parse_overrides,
    settings_of_running,
)
from infra.terminal.output import print_json, stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.replay.simulation.report import Findings
    from infra.replay.simulation.run import Changes
    from schemas.settings import LogSettings

LOG = "log"  # in place of a file: this deployment's own traffic
_SIMULATE, _SHADOW = in_panel("Simulate"), in_panel("From the log")
_FAULT = functools.partial(_SIMULATE, metavar="NAME@TIME[+DURATION]")
Faults = list[str] | None


def replay(
    source: Annotated[
        str,
        typer.Argument(metavar="RECORDING", help="A file of `trivium record`, a trace, or log."),
    ],
    policy: Annotated[
        str, typer.Option(help="Decide with this policy, too.", show_default="the recorded one")
    ] = "",
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Decide with this setting of \\[router], too."
        ),
    ] = None,
    simulated: Annotated[
        bool, _SIMULATE("--simulate", help="Serve the requests again on simulated workers.")
    ] = False,
    kill: Annotated[Faults, _FAULT(help="This worker dies, and is back after +DURATION.")] = None,
    stop: Annotated[Faults, _FAULT(help="Its process is frozen for +DURATION (5s).")] = None,
    slow: Annotated[Faults, _FAULT(help="Its prompts take 10 times longer.")] = None,
    drain: Annotated[Faults, _FAULT(help="It drains, and restarts after +DURATION (2s).")] = None,
    pools: Annotated[
        str, _SIMULATE(help="Workers, such as 2P2D.", show_default="the recorded ones")
    ] = "",
    gpu: Annotated[
        str,
        _SIMULATE(
            help="Published GPU: h100, h200, a100 or l4.",
            show_default="the measured speeds; of a trace, h100",
        ),
    ] = "",
    model: Annotated[
        str,
        _SIMULATE(
            help="Model: llama-8b, qwen2.5-14b or qwen3-30b-a3b.",
            show_default="the measured speeds; of a trace, llama-8b",
        ),
    ] = "",
    since: Annotated[
        str, _SHADOW(metavar="DURATION", help="How far back to read the log: 90s, 30m, 2h.")
    ] = "10m",
    shadow: Annotated[
        bool, _SHADOW("--shadow", help="Compare with the decisions of a shadow router.")
    ] = False,
    shadow_id: Annotated[
        str, _SHADOW("--shadow-id", help="Id of the shadow.", show_default="the only one")
    ] = "",
    jobs: Annotated[
        int, typer.Option(min=0, help="Number of processes.", show_default="one per core")
    ] = 0,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Decide recorded traffic again, or simulate it.

    Every recorded event is applied to the router core again, and every effect is compared. Exit
    code 1 if any differs; the first difference of each router is shown. With another policy or
    other settings, it counts the placements that would have differed, each at its recorded moment.

    A simulation shows what would have followed: TTFT, TPOT, whole answers, KV bytes. Simulated
    workers are as many and as fast as the recorded ones, or are of a published GPU and model. The
    requests are served twice: as they were, and with the changes. A fault is NAME@TIME, counted
    from the first request, of a worker, the router or the broker. A trace has neither decisions nor
    workers: name these with --pools.

    In place of a file, log is this deployment's own traffic. With --shadow it is compared with what
    `trivium run router --shadow` has decided; name the settings that it was started with.

    Examples: `trivium replay last.avro`, `trivium replay log --since 30m --policy conditional`,
    `trivium replay last.avro --set local_share=1 --simulate`,
    `trivium replay last.avro --kill decode-1@12.5s+4s`,
    `trivium replay azure.csv --pools 2P2D --slow prefill-0@30s`,
    `trivium replay log --shadow --since 1h`
    """
    from infra.replay.simulation.run import Changes

    fault_options = {"kill": kill, "stop": stop, "slow": slow, "drain": drain}
    faults = [(kind, text) for kind, texts in fault_options.items() for text in texts or ()]
    changes = Changes(parse_overrides(policy, changed or []), faults, pools, gpu, model)
    simulates = simulated or changes.need_simulation
    if (shadow or shadow_id) and (simulates or source != LOG):
        raise ConfigError(
            "--shadow: expected with the source log, and without a simulation of its own"
        )
    if shadow or shadow_id:
        findings = _compare(since, shadow_id, dict(changes.overrides), config, bootstrap)
    else:
        with _file(source, since, config, bootstrap) as path:
            if simulates:
                findings = _simulate(path, changes)
            else:
                findings = decide_again(path, dict(changes.overrides), jobs)
    show(findings, as_json=as_json)


def show(findings: "Findings", *, as_json: bool) -> None:
    """Print the findings; exit with code 1 if the replay was not equal."""
    if as_json:
        print_json(findings.as_dict())
    else:
        findings.show(stdout_console())
    if not findings.is_equal:
        raise typer.Exit(1)


def decide_again(path: Path, overrides: dict[str, str], jobs: int = 0) -> "Findings":
    """Apply the recording to the router core again, and ask other settings if there are any."""
    from infra.replay.pieces import replay_side_by_side
    from infra.replay.redeciding import Redeciding
    from infra.replay.replaying import replay as replay_events
    from infra.replay.simulation.report import Findings

    if not overrides:
        return Findings(replayed=replay_side_by_side(path, jobs or os.cpu_count() or 1))
    redeciding = Redeciding(overrides)
    report = replay_events(path, redeciding.watch)
    return Findings(replayed=report, changes=redeciding.changes, settings=overrides)


def _simulate(path: Path, changes: "Changes") -> "Findings":
    """Replay a recording and simulate its requests, or simulate those of a trace."""
    from infra.replay.redeciding import SETTABLE, Redeciding
    from infra.replay.simulation.run import what_if
    from infra.replay.simulation.traffic import read
    from infra.traces.formats import is_recording
    from infra.traces.formats import read as read_trace

    try:
        is_trace = not is_recording(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if is_trace:
        return what_if(read_trace(path), changes)
    overrides = dict(changes.overrides)
    asks = bool(overrides) and overrides.keys() <= SETTABLE
    redeciding = Redeciding(overrides if asks else {})
    traffic = read(path, redeciding.watch) if asks else read(path)
    return replace(
        what_if(traffic, changes),
        replayed=traffic.replayed,
        changes=redeciding.changes if asks else None,
        settings=overrides,
    )


def _compare(
    since: str,
    shadow_id: str,
    overrides: dict[str, str],
    config: Path | None,
    bootstrap: str | None,
) -> "Findings":
    """Compare a shadow's decisions of the span with the live ones, and what followed."""
    from infra.replay.shadowing import read_decisions
    from infra.replay.simulation.comparison import compare_outcomes, compare_placements
    from infra.replay.simulation.report import Findings
    from infra.replay.simulation.traffic import read

    with _span(since, config, bootstrap) as (path, log, (since_ms, until_ms)):
        decisions = asyncio.run(read_decisions(log, since_ms, until_ms, shadow_id))
        traffic = read(path)
    comparison = compare_placements(traffic, decisions)
    policies = {decision.policy for decision in decisions if decision.policy}
    if len(policies) == 1:
        overrides = {"policy": policies.pop()} | overrides
    return Findings(
        replayed=traffic.replayed,
        changes=comparison.changes,
        settings=overrides,
        runs=compare_outcomes(traffic, comparison, overrides),
    )


@contextmanager
def _file(source: str, since: str, config: Path | None, bootstrap: str | None) -> Iterator[Path]:
    if source != LOG:
        yield Path(source)
        return
    with _span(since, config, bootstrap) as (path, *_):
        yield path


@contextmanager
def _span(
    since: str, config: Path | None, bootstrap: str | None
) -> Iterator[tuple[Path, "LogSettings", tuple[int, int]]]:
    """Record the last part of the log; yield the file, the log's settings and the span in ms."""
    from infra.replay.collecting import record
    from streams.log.clock import wall_ms

    settings, now_ms = settings_of_running(config, bootstrap), wall_ms()
    span = now_ms - duration_ms(since), now_ms
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "span.avro"
        look_back_ms = 2 * settings.router.snapshot_ms
        asyncio.run(record(settings.log, path, *span, look_back_ms=look_back_ms))
        yield path, settings.log, span
