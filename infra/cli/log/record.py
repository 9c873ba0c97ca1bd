"""Implements `trivium record`: writes what routers did to a file for `trivium replay`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.log.explain import duration_ms
from infra.cli.log.replay import decide_again, show
from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json
from schemas.errors import ConfigError


def record(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="How long ago the span begins: 90s, 30m, 2h.")
    ] = "10m",
    until: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long ago the span ends.", show_default="now"),
    ] = "",
    no_bodies: Annotated[
        bool,
        typer.Option("--no-bodies", help="Leave out prompts, passages, answers and other texts."),
    ] = False,
    redact: Annotated[
        bool,
        typer.Option("--redact", help="Leave out texts, and replace names of callers and data."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Replay it at once; exit code 1 if it differs.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Record what routers did, for a replay.

    Record what routers did: requests, all else that they applied, decisions, outcomes, usage.

    The file has all that a replay needs, including prompts. The log keeps this for a day; keep the
    file as long as you need it. With --no-bodies, texts are replaced by digests with a secret salt,
    and with --redact also the names of sessions, tenants, collections and documents. A replay still
    decides the same.

    Examples: `trivium record -o last.avro`, `trivium record --since 3h --until 2h -o hour.avro`,
    `trivium record --no-bodies --check -o last.avro`
    """
    from infra.replay.collecting import BODIES, NAMES
    from infra.replay.collecting import record as collect
    from streams.log.clock import wall_ms

    now_ms = wall_ms()
    since_ms = now_ms - duration_ms(since)
    until_ms = now_ms - duration_ms(until, "--until") if until else now_ms
    if since_ms >= until_ms:
        raise ConfigError(f"--until: expected less than --since {since}, found {until}")
    settings = settings_of_running(config, bootstrap)
    look_back_ms = 2 * settings.router.snapshot_ms
    leaves_out = (BODIES, NAMES) if redact else (BODIES,) if no_bodies else ()
    span = since_ms, until_ms
    collecting = collect(
        settings.log, output, *span, look_back_ms=look_back_ms, leaves_out=leaves_out
    )
    lives = asyncio.run(collecting)
    rows = [
        {
            "router": life.router_id,
            "epoch": life.epoch,
            "events": len(life.lines),
            "first_ms": life.lines[0][1].now_ms,
            "last_ms": life.lines[-1][1].now_ms,
        }
        for life in lives
    ]
    size = output.stat().st_size
    if as_json and not check:
        print_json({"file": str(output), "bytes": size, "lives": rows})
    elif not as_json:
        for row in rows:
            print(f"{row['router']} epoch {row['epoch']}: {row['events']:,} events")
        print(f"{output}: {size / 1e6:.1f} MB; replay it with `trivium replay {output}`")
    if check:
        show(decide_again(output, {}), as_json=as_json)
