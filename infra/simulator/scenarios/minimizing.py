"""A seed that fails, with fewer faults and clients that fail in the same place."""

from infra.simulator.scenarios.run import Verdict, run
from infra.simulator.scenarios.scenario import Scenario


def minimized(scenario: Scenario, found: Verdict) -> Scenario:
    """Without anything that can be left out alone."""
    while (less := _less(scenario, found)) is not None:
        scenario = less
    return scenario


def _less(scenario: Scenario, found: Verdict) -> Scenario | None:
    """One fault or client less that fails all the same; None: each of them is needed."""
    faults = {each.number for each in scenario.plan}
    clients = {each.name for each in scenario.clients}
    candidates = [scenario.only(faults - {fault}, clients) for fault in sorted(faults)]
    candidates += [scenario.only(faults, clients - {client}) for client in sorted(clients)]
    return next((less for less in candidates if run(less).where == found.where), None)
