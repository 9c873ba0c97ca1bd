"""`trivium simulate`: seeds of faults on virtual time, under all checkers."""

import itertools
import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.cli.options import AsJson
from infra.terminal.output import stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.simulator.scenarios.many import Summary
    from infra.simulator.scenarios.run import Verdict
    from infra.simulator.scenarios.scenario import Scenario

EXIT_VIOLATION = 1
EXAMPLES = """[bold]Examples[/]

trivium simulate --seeds 1000 [dim]a violation prints the command that shows it again[/]

trivium simulate --until-fails --first 20000

trivium simulate --seed 17 --minimize
"""


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    until_fails: Annotated[
        bool, typer.Option("--until-fails", help="Seed after seed until one fails.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one, with its faults.")] = None,
    faults: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Of the seed, only these: 0,3 or none.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Likewise: c-0,c-2 or none.")
    ] = None,
    minimize: Annotated[
        bool, typer.Option("--minimize", help="Find the fewest faults with which the seed fails.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes.", show_default="one per core")] = 0,
    as_json: AsJson = False,
) -> None:
    """The real router, gateways and workers on virtual time, while everything breaks.

    Each seed fixes workers, load and faults. Checkers outside the code look at every step; then all
    is well again, and everybody has to be served. Exit code 1 where an invariant was broken.
    """
    if seed is not None:
        _one(seed, faults, clients, minimize=minimize, as_json=as_json)
        return
    if faults or clients or minimize:
        raise ConfigError("--faults, --clients and --minimize: expected with --seed, found without")
    from infra.simulator.scenarios.many import Summary, verdicts

    found, begun_s = Summary(), time.monotonic()
    numbers = itertools.count(first) if until_fails else range(first, first + seeds)
    console = Console(stderr=True)
    with console.status("simulating") as status:
        for verdict in verdicts(numbers, jobs or os.cpu_count() or 1):
            found.add(verdict)
            if verdict.violation:
                console.print(_says(verdict), highlight=False, markup=False)
            if until_fails and found.violations:
                break
            status.update(f"seed {verdict.seed}, violations: {len(found.violations)}")
    _tell(found, time.monotonic() - begun_s, as_json)


def _says(verdict: "Verdict") -> str:
    again = f"trivium simulate --seed {verdict.seed}"
    return f"seed {verdict.seed}, {verdict.where}: {verdict.violation}\n  again: {again} --minimize"


def _tell(found: "Summary", took_s: float, as_json: bool) -> None:
    per_s = found.seeds / took_s
    if as_json:
        print(json.dumps(_figures(found, per_s), indent=1))
    else:
        console = stdout_console()
        console.print(_table(found))
        console.print(
            f"{found.seeds} seeds, {found.requests} requests, {found.simulated_ms / 1000:.0f} s of "
            f"virtual time in {took_s:.0f} s: {per_s:.0f} seeds/s"
        )
        console.print(f"pairs of a fault and a phase that never met: {len(found.unreached)}")
        console.print(f"violations: {len(found.violations)}")
    if found.violations:
        raise typer.Exit(EXIT_VIOLATION)


def _figures(found: "Summary", per_s: float) -> dict[str, object]:
    reached: dict[str, dict[str, int]] = {}
    for (kind, phase), count in sorted(found.reached.items()):
        reached.setdefault(kind, {})[phase] = count
    return {
        "seeds": found.seeds,
        "requests": found.requests,
        "simulated_s": round(found.simulated_ms / 1000, 1),
        "seeds_per_s": round(per_s, 1),
        "reached": reached,
        "unreached": found.unreached,
        "violations": [
            {"seed": each.seed, "where": each.where, "violation": each.violation}
            for each in found.violations
        ],
    }


def _table(found: "Summary") -> Table:
    """How often each kind of fault struck while a request was in each phase."""
    from infra.simulator.faults.aiming import PHASES
    from infra.simulator.faults.kinds import KINDS

    table = Table("fault", box=None, title="faults, by what a request was in")
    for phase in PHASES:
        table.add_column(phase.replace("_", " "), justify="right", max_width=6, overflow="fold")
    for kind in KINDS:
        table.add_row(kind, *(str(found.reached[kind, phase]) for phase in PHASES))
    return table


def _one(
    seed: int, faults: str | None, clients: str | None, *, minimize: bool, as_json: bool
) -> None:
    from infra.simulator.scenarios.minimizing import minimized
    from infra.simulator.scenarios.run import run

    scenario = _chosen(seed, faults, clients)
    verdict = run(scenario)
    if minimize and verdict.violation:
        scenario = minimized(scenario, verdict)
        verdict = run(scenario)
    plan = [
        {"number": e.number, "fault": e.kind, "from_ms": round(e.at_ms), "phase": e.phase}
        for e in scenario.plan
    ]
    if as_json:
        said = {"command": scenario.command, "plan": plan, "requests": verdict.requests}
        told = {"where": verdict.where, "violation": verdict.violation}
        print(json.dumps({**said, **told}, indent=1))
    else:
        console = stdout_console()
        table = Table("", "fault", "from ms", "when one is", box=None, title=scenario.shape.name)
        for row in plan:
            table.add_row(*(str(value) for value in row.values()))
        console.print(table)
        console.print(f"{verdict.requests} requests, {verdict.simulated_ms:.0f} ms")
        console.print(f"violation: {verdict.violation or 'none'} {verdict.where}", markup=False)
        console.print(f"again: {scenario.command}", soft_wrap=True)
    if verdict.violation:
        raise typer.Exit(EXIT_VIOLATION)


def _chosen(seed: int, faults: str | None, clients: str | None) -> "Scenario":
    """The seed's scenario, or a part of it."""
    from infra.simulator.scenarios.scenario import drawn

    scenario = drawn(seed)
    numbers = _listed("--faults", faults, [str(each.number) for each in scenario.plan])
    names = _listed("--clients", clients, [each.name for each in scenario.clients])
    return scenario.only([int(number) for number in numbers], names)


def _listed(option: str, text: str | None, known: list[str]) -> list[str]:
    if text is None:
        return known
    wanted = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{option}: expected of {', '.join(known) or 'none'}, found {name!r}")
    return wanted
