"""The fewest faults and clients with which a seed fails."""

import pytest

from infra.simulator.scenarios.run import run
from infra.simulator.scenarios.scenario import draw_scenario
from infra.simulator.scenarios.seed_runner import minimize_scenario, run_seed
from tests.infra.simulator.scenarios.bugs import BUGS


def test_minimized_scenario_fails_in_same_place_and_is_minimal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    BUGS["a void order is answered"].put_in(monkeypatch)
    failure = next(verdict for verdict in map(run_seed, range(500)) if verdict.violation)
    whole = draw_scenario(failure.seed)
    smallest = minimize_scenario(whole, failure)
    assert run(smallest).where == failure.where
    assert len(smallest.plan) + len(smallest.clients) < len(whole.plan) + len(whole.clients)
    faults = {fault.number for fault in smallest.plan}
    clients = {client.name for client in smallest.clients}
    fewer = [smallest.only(faults - {fault}, clients) for fault in faults]
    fewer += [smallest.only(faults, clients - {client}) for client in clients]
    assert all(run(scenario).where != failure.where for scenario in fewer)


def test_partial_scenario_command_names_faults_and_clients() -> None:
    whole = draw_scenario(3)
    assert whole.command == "trivium simulate --seed 3"
    part = whole.only({whole.plan[0].number}, set())
    assert part.command == "trivium simulate --seed 3 --faults 0 --clients none"
