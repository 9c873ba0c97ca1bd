"""Minimizes a failing scenario: fewer faults and clients that still fail in the same place."""

from infra.simulator.scenarios.run import SeedVerdict, run
from infra.simulator.scenarios.scenario import Scenario


def minimize_scenario(scenario: Scenario, verdict: SeedVerdict) -> Scenario:
    """Remove faults and clients while the scenario fails; none of the rest can be removed alone."""
    while (less := _shrink_once(scenario, verdict)) is not None:
        scenario = less
    return scenario


def _shrink_once(scenario: Scenario, verdict: SeedVerdict) -> Scenario | None:
    """Return the scenario without one fault or client if it still fails; None if all are needed."""
    faults = {fault.number for fault in scenario.plan}
    clients = {client.name for client in scenario.clients}
    candidates = [scenario.only(faults - {fault}, clients) for fault in sorted(faults)]
    candidates += [scenario.only(faults, clients - {client}) for client in sorted(clients)]
    return next((less for less in candidates if run(less).where == verdict.where), None)
