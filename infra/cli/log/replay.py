"""Implements `trivium replay`: applies a recording again, and compares."""

import functools
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    ApiKey,
    AsJson,
    Config,
    gateway_url,
    in_panel,
    parse_overrides,
)
from infra.cli.trace_sender import pace_of
from infra.terminal.output import print_json
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.replay.redeciding import PlacementChanges
    from infra.replay.replaying import Difference, ReplayedLife, ReplayReport

_SIMULATE = in_panel("What would have happened")
_LIVE = in_panel("On a running cluster")
_FAULT = functools.partial(_SIMULATE, metavar="NAME@TIME[+DURATION]")
Faults = list[str] | None
_SHOWN_CHARS = 2_000  # of an input or an effect


def replay(
    file: Annotated[Path, typer.Argument(help="What `trivium record` wrote.")],
    policy: Annotated[
        str, typer.Option(help="Ask this policy about each placement, too.", show_default="none")
    ] = "",
    changed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Likewise, with this of \\[router]."),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Also what would follow, at its own workers.")
    ] = False,
    simulated: Annotated[
        bool, _SIMULATE("--simulate", help="Also what would have followed, on simulated workers.")
    ] = False,
    kill: Annotated[Faults, _FAULT(help="Dies; is back after +DURATION.")] = None,
    stop: Annotated[Faults, _FAULT(help="Its process is stopped for +DURATION (5s).")] = None,
    slow: Annotated[Faults, _FAULT(help="Prompts take 10 times longer.")] = None,
    drain: Annotated[Faults, _FAULT(help="Takes nothing new, and restarts after it (2s).")] = None,
    pools: Annotated[str, _SIMULATE(help="Workers, such as 2P2D.", show_default="as then")] = "",
    gpu: Annotated[str, _SIMULATE(help="h100, h200, a100 or l4.")] = "h100",
    model: Annotated[str, _SIMULATE(help="llama-8b, qwen2.5-14b or qwen3-30b-a3b.")] = "llama-8b",
    live: Annotated[
        bool, _LIVE("--live", help="Send the requests to a running cluster, and compare.")
    ] = False,
    speed: Annotated[
        str, _LIVE(metavar="SPEED", help="A factor such as 1 or 10, max, or closed.")
    ] = "1",
    streams: Annotated[int, _LIVE(min=1, max=4_096, help="With closed: requests at a time.")] = 8,
    url: Annotated[
        str | None, _LIVE(help="Of the gateway.", show_default="the one that runs here")
    ] = None,
    api_key: ApiKey = "none",
    jobs: Annotated[int, typer.Option(min=0, help="Processes.", show_default="one per core")] = 0,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Replay a recording: every event into the router core again, every effect compared.

    Exit code 1 if any effects differ from the recorded ones; the first difference of each
    incarnation of a router is shown. Incarnations, and their parts between snapshots, are replayed
    in parallel, with the same result. With another policy or other settings, it counts the
    placements that would have differed, each at its recorded moment. --predict shows what would
    have followed: TTFT, TPOT, whole answers and KV bytes of the same requests on simulated workers,
    as many and as fast as the recorded ones. With --predict, any setting of the router may be
    changed.

    With --simulate, or with a fault, the requests are simulated twice: as they were, and with the
    faults, policy and settings. The file may then also be a trace in any format of `trivium trace`.
    A fault is NAME@TIME, counted from the first request, of a worker, the router or the broker.

    With --live, a running cluster gets the same prompts, in sessions with new names. Answers are
    compared by how they ended and how many tokens they have. Exit code 1 if a request fails that
    completed in the recording.

    Examples: `trivium replay last.avro`, `trivium replay last.avro --policy static --predict`,
    `trivium replay last.avro --set policy=conditional --set max_local_prefill_tokens=2000`,
    `trivium replay last.avro --kill decode-1@12.5s+4s`,
    `trivium replay azure.csv --pools 2P2D --slow prefill-0@30s --simulate`,
    `trivium replay last.avro --live --speed 10`
    """
    fault_options = {"kill": kill, "stop": stop, "slow": slow, "drain": drain}
    faults = [(kind, text) for kind, texts in fault_options.items() for text in texts or ()]
    if predict and (simulated or faults or pools):
        raise ConfigError(
            "--predict: expected without faults and --simulate, which have other speeds"
        )
    if live:
        from infra.cli.log.live import resend

        if simulated or faults or pools or policy or changed:
            raise ConfigError("--live: expected neither faults nor settings beside it")
        pace = pace_of(speed, streams)
        resend(file, pace, url or gateway_url(config), api_key, as_json=as_json)
        return
    if simulated or faults or pools:
        from infra.cli.log.simulation import simulate

        wish = parse_overrides(policy, changed or [])
        simulate(file, wish, faults, pools=pools, gpu=gpu, model=model, as_json=as_json)
        return
    from infra.cli.log.prediction import predict_figures, show
    from infra.replay.pieces import replay_side_by_side
    from infra.replay.redeciding import SETTABLE, Redeciding
    from infra.replay.replaying import replay as run

    overrides = parse_overrides(policy, changed or [])
    places = overrides and not (predict and overrides.keys() - SETTABLE)
    redeciding = Redeciding(overrides) if places else None
    if redeciding:
        report = run(file, redeciding.watch)
    else:
        report = replay_side_by_side(file, jobs or os.cpu_count() or 1)
    if as_json:
        sections: dict[str, Any] = {}
        if redeciding:
            sections["changes"] = _changes_as_dict(redeciding.changes)
        if predict:
            sections["predicted"] = predict_figures(file, overrides)
        print_json(_as_json(report) | sections)
    else:
        _show(report)
        if redeciding:
            _show_changes(redeciding.changes)
        if predict:
            show(predict_figures(file, overrides))
    if not report.is_equal:
        raise typer.Exit(1)


def _show_changes(changes: "PlacementChanges") -> None:
    count = max(1, changes.placements)
    print(f"{changes.placements:,} placements; {changes.same:,} would be the same")
    for (was, would), number in changes.modes.most_common():
        print(f"  {number:,} ({number / count:.1%}) {was}: would be {would}")
    for number, what in (
        (changes.workers, "of the same mode on other workers"),
        (changes.orchestrations, "on the same workers in another order"),
    ):
        if number:
            print(f"  {number:,} ({number / count:.1%}) {what}")
    if changes.expected:
        print(
            f"  of {changes.expected:,} of these the router had estimates: TTFT "
            f"{changes.ttft_ms / changes.expected:+.1f} ms, TPOT "
            f"{changes.tpot_ms / changes.expected:+.2f} ms on average"
        )


def _changes_as_dict(changes: "PlacementChanges") -> dict[str, Any]:
    modes = {f"{was} to {would}": number for (was, would), number in changes.modes.items()}
    return {**asdict(changes), "modes": modes}


def _show(report: "ReplayReport") -> None:
    for life in report.lives:
        print(f"{_name(life)}: {_life_summary(life)}")
        if life.difference is not None:
            for line in _difference_lines(life, life.difference):
                print(f"  {printable(line)}")
    cpu_s = max(report.cpu_s, 1e-3)
    print(
        f"{'equal' if report.is_equal else 'NOT equal'}: {report.events:,} events of "
        f"{report.recorded_s:,.1f} s in {report.wall_s:.2f} s, "
        f"{report.recorded_s / max(report.wall_s, 1e-3):,.0f} times real time; per core "
        f"{report.recorded_s / cpu_s:,.0f} times real time, {report.events / cpu_s:,.0f} events/s"
    )


def _name(life: "ReplayedLife") -> str:
    return printable(f"{life.router_id} life {life.epoch}")


def _life_summary(life: "ReplayedLife") -> str:
    summary = f"{life.events:,} events, {life.with_effects:,} with effects"
    if life.difference is not None:
        return f"{summary}; then a difference"
    if life.is_stopped:
        return f"{summary}, equal to its end"
    missing = f"; {life.unknown:,} decisions after it are not" if life.unknown else ""
    return f"{summary}, equal up to the last line of its journal{missing}"


def _difference_lines(life: "ReplayedLife", difference: "Difference") -> list[str]:
    from streams.journal.journal import version_of_core

    row = difference.row
    at = datetime.fromtimestamp(row.now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    lines = [
        f"line {row.seq} at {at}, {row.topic}[{row.partition}] offset {row.offset}",
        f"input: {_short(difference.event)}",
        *(f"recorded: {_short(decision)}" for decision in difference.decided),
        f"recorded checksum of effects: {row.effects:08x}",
        *(f"replayed: {_short(effect)}" for effect in difference.effects),
    ]
    if not difference.effects:
        lines.append("replayed: nothing followed")
    if difference.error:
        lines.append(f"replayed: the core raised {difference.error}")
    if life.version != version_of_core():
        lines.append(f"recorded by version {life.version}, replayed by {version_of_core()}")
    return lines


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _as_json(report: "ReplayReport") -> dict[str, Any]:
    lives = []
    for life in report.lives:
        row: dict[str, Any] = {
            "router": life.router_id,
            "epoch": life.epoch,
            "version": life.version,
            "events": life.events,
            "first_ms": life.first_ms,
            "last_ms": life.last_ms,
            "is_stopped": life.is_stopped,
            "unknown_decisions": life.unknown,
        }
        if life.difference is not None:
            row["difference"] = _difference_lines(life, life.difference)
        lives.append(row)
    return {
        "is_equal": report.is_equal,
        "events": report.events,
        "recorded_s": report.recorded_s,
        "wall_s": report.wall_s,
        "cpu_s": report.cpu_s,
        "lives": lives,
    }
