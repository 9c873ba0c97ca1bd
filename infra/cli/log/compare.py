"""Implements `trivium compare`: a shadow router's placements beside the actual ones."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.log.explain import duration_ms
from infra.cli.options import AsJson, Bootstrap, Config, parse_overrides, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.prediction.agreement import Agreement
    from schemas.records import Decision
    from schemas.settings import LogSettings


def compare(
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="How long ago it begins: 90s, 30m, 2h.")
    ] = "10m",
    shadow: Annotated[
        str, typer.Option(help="Which shadow, by its id.", show_default="the only one")
    ] = "",
    changed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="As the shadow was started with."),
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Sum up what a shadow router would have done: placements, TTFT, TPOT, whole answers, KV bytes.

    Where shadow and routers agree, outcomes of the log count. Where they differ, a simulator
    computes what would have followed, with workers as fast as the real ones. It also simulates the
    actual placements, which shows how far to trust it. The shadow's policy is read from its
    decisions; name the other settings that it was started with.

    Examples: `trivium compare`, `trivium compare --since 1h --set local_share=1 --json`
    """
    from infra.prediction.agreement import agreement, outcomes
    from streams.log.clock import wall_ms

    settings = settings_of_running(config, bootstrap)
    overrides, now_ms = parse_overrides("", changed or []), wall_ms()
    since_ms = now_ms - duration_ms(since)
    look_back_ms = 2 * settings.router.snapshot_ms
    traffic, decisions = asyncio.run(read(settings.log, since_ms, now_ms, look_back_ms, shadow))
    result = agreement(traffic, decisions)
    policies = {decision.policy for decision in decisions if decision.policy}
    if len(policies) == 1:
        overrides = {"policy": policies.pop()} | overrides
    rows = outcomes(traffic, result, overrides)
    if as_json:
        print_json({"placements": _as_json(result), "settings": overrides, "figures": rows})
        return
    _show(result, rows)


async def read(
    log: "LogSettings", since_ms: int, until_ms: int, look_back_ms: int, shadow: str
) -> "tuple[Any, list[Decision]]":
    """Return the span's traffic, and the shadow's decisions.

    Raises ConfigError where the named shadow is unknown, or there are several and none is named.
    """
    from infra.prediction.traffic import read as read_file
    from infra.replay.collecting import record
    from infra.replay.shadowing import TOPIC
    from infra.story.record_finder import CLOCKS_MS, LogFinder, Window
    from streams.log.registry import make_codec

    finder = LogFinder(log, await asyncio.to_thread(make_codec, log))
    window = Window(max(0, since_ms - CLOCKS_MS), until_ms + CLOCKS_MS)
    decisions = await finder.find(TOPIC, range(log.session_partitions), "", window)
    names = sorted({decision.router_id for decision in decisions})
    if shadow and shadow not in names:
        raise ConfigError(f"--shadow: expected any of {', '.join(names) or 'none'}, found {shadow}")
    if not shadow and len(names) > 1:
        raise ConfigError(f"--shadow: expected one of {', '.join(names)}; name it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "span.avro"
        await record(log, path, since_ms, until_ms, look_back_ms=look_back_ms)
        traffic = await asyncio.to_thread(read_file, path)
    return traffic, [decision for decision in decisions if shadow in ("", decision.router_id)]


def _as_json(result: "Agreement") -> dict[str, Any]:
    return {
        "placements": result.placements,
        "same": result.same,
        "share": result.share,
        "modes": {f"{was} to {would}": number for (was, would), number in result.modes.items()},
        "workers": result.workers,
        "orchestrations": result.orchestrations,
        "unseen": result.unseen,
    }


def _show(result: "Agreement", rows: dict[str, dict[str, Any]]) -> None:
    from infra.prediction.figures import table

    print(f"{result.placements:,} placements; {result.same:,} ({result.share:.1%}) are the same")
    differing = [
        *(
            (number, f"{was}: would be {would}")
            for (was, would), number in result.modes.most_common()
        ),
        (result.workers, "of the same mode on other workers"),
        (result.orchestrations, "on the same workers in another order"),
    ]
    for number, what in differing:
        if number:
            print(f"  {number:,} ({number / result.placements:.1%}) {printable(what)}")
    if result.unseen:
        print(f"  {result.unseen:,} more the shadow has not seen")
    stdout_console().print(table("times in ms", rows))
