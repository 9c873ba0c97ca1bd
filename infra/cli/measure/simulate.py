"""Implements `trivium simulate`: runs seeds with faults on virtual time, under all checkers."""

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
    from infra.simulator.scenarios.run import SeedVerdict
    from infra.simulator.scenarios.scenario import Scenario
    from infra.simulator.scenarios.seed_runner import Summary

EXIT_VIOLATION = 1
EXAMPLES = """[bold]Examples[/]

trivium simulate --seeds 1000 [dim]a violation prints the command that shows it again[/]

trivium simulate --until-fails --first 20000

trivium simulate --seed 17 --minimize
"""


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    until_fails: Annotated[
        bool, typer.Option("--until-fails", help="Run seed after seed until one fails.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Run only this seed, with its faults.")
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Only these faults of the seed: 0,3 or none."),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these clients of the seed: c-0,c-2 or none."),
    ] = None,
    minimize: Annotated[
        bool, typer.Option("--minimize", help="Find the fewest faults with which the seed fails.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(help="Number of processes.", show_default="one per core")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Run seeds of faults on virtual time.

    Run the real router, gateways and workers on virtual time, with faults of all kinds.

    Each seed determines workers, models, load and faults. Checkers outside the code examine every
    step. Then all faults end, and every client must be served. Exit code 1 if an invariant was
    broken.
    """
    if seed is not None:
        _run_seed(seed, faults, clients, minimize=minimize, as_json=as_json)
        return
    if faults or clients or minimize:
        raise ConfigError("--faults, --clients and --minimize: expected with --seed, found without")
    from infra.simulator.scenarios.seed_runner import Summary, verdicts

    tally, began_s = Summary(), time.monotonic()
    numbers = itertools.count(first) if until_fails else range(first, first + seeds)
    console = Console(stderr=True)
    with console.status("simulating") as status:
        for verdict in verdicts(numbers, jobs or os.cpu_count() or 1):
            tally.add(verdict)
            if verdict.violation:
                console.print(_violation_text(verdict), highlight=False, markup=False)
            if until_fails and tally.violations:
                break
            status.update(f"seed {verdict.seed}, violations: {len(tally.violations)}")
    _tell(tally, time.monotonic() - began_s, as_json)


def _violation_text(verdict: "SeedVerdict") -> str:
    rerun = f"trivium simulate --seed {verdict.seed}"
    return f"seed {verdict.seed}, {verdict.where}: {verdict.violation}\n  again: {rerun} --minimize"


def _tell(tally: "Summary", took_s: float, as_json: bool) -> None:
    per_s = tally.seeds / took_s
    if as_json:
        print(json.dumps(_figures(tally, per_s), indent=1))
    else:
        console = stdout_console()
        console.print(_table(tally))
        console.print(
            f"{tally.seeds} seeds, {tally.requests} requests, {tally.simulated_ms / 1000:.0f} s of "
            f"virtual time in {took_s:.0f} s: {per_s:.0f} seeds/s"
        )
        console.print(f"pairs of a fault and a phase that never met: {len(tally.unreached)}")
        console.print(f"violations: {len(tally.violations)}")
    if tally.violations:
        raise typer.Exit(EXIT_VIOLATION)


def _figures(tally: "Summary", per_s: float) -> dict[str, object]:
    reached: dict[str, dict[str, int]] = {}
    for (kind, phase), count in sorted(tally.reached.items()):
        reached.setdefault(kind, {})[phase] = count
    return {
        "seeds": tally.seeds,
        "requests": tally.requests,
        "simulated_s": round(tally.simulated_ms / 1000, 1),
        "seeds_per_s": round(per_s, 1),
        "reached": reached,
        "unreached": tally.unreached,
        "violations": [
            {"seed": violation.seed, "where": violation.where, "violation": violation.violation}
            for violation in tally.violations
        ],
    }


def _table(tally: "Summary") -> Table:
    """Return how often each kind of fault struck while a request was in each phase."""
    from infra.simulator.faults.aiming import PHASES
    from infra.simulator.faults.kinds import KINDS

    table = Table("fault", box=None, title="faults, by what a request was in")
    for phase in PHASES:
        table.add_column(phase.replace("_", " "), justify="right", max_width=6, overflow="fold")
    for kind in KINDS:
        table.add_row(kind, *(str(tally.reached[kind, phase]) for phase in PHASES))
    return table


def _run_seed(
    seed: int, faults: str | None, clients: str | None, *, minimize: bool, as_json: bool
) -> None:
    from infra.simulator.scenarios.run import run
    from infra.simulator.scenarios.seed_runner import minimize_scenario

    scenario = _select_scenario(seed, faults, clients)
    verdict = run(scenario)
    if minimize and verdict.violation:
        scenario = minimize_scenario(scenario, verdict)
        verdict = run(scenario)
    plan = [
        {"number": e.number, "fault": e.kind, "from_ms": round(e.at_ms), "phase": e.phase}
        for e in scenario.plan
    ]
    if as_json:
        report = {"command": scenario.command, "plan": plan, "requests": verdict.requests}
        failure = {"where": verdict.where, "violation": verdict.violation}
        print(json.dumps({**report, **failure}, indent=1))
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


def _select_scenario(seed: int, faults: str | None, clients: str | None) -> "Scenario":
    """Return the seed's scenario, or a part of it."""
    from infra.simulator.scenarios.scenario import draw_scenario

    scenario = draw_scenario(seed)
    numbers = _parse_list("--faults", faults, [str(fault.number) for fault in scenario.plan])
    names = _parse_list("--clients", clients, [client.name for client in scenario.clients])
    return scenario.only([int(number) for number in numbers], names)


def _parse_list(option: str, text: str | None, choices: list[str]) -> list[str]:
    if text is None:
        return choices
    selection = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    for name in selection:
        if name not in choices:
            raise ConfigError(
                f"{option}: expected of {', '.join(choices) or 'none'}, found {name!r}"
            )
    return selection
