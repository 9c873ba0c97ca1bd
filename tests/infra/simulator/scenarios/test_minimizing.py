"""The fewest faults and clients with which a seed fails."""

import pytest

from infra.simulator.scenarios.minimizing import minimize_scenario
from infra.simulator.scenarios.run import run
from infra.simulator.scenarios.scenario import draw_scenario
from infra.simulator.scenarios.seed_runner import run_seed
from tests.infra.simulator.scenarios.bugs import BUGS


def test_what_is_left_fails_in_the_same_place_and_nothing_of_it_can_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    BUGS["a void order is answered"].put_in(monkeypatch)
    found = next(each for each in map(run_seed, range(500)) if each.violation)
    whole = draw_scenario(found.seed)
    less = minimize_scenario(whole, found)
    assert run(less).where == found.where
    assert len(less.plan) + len(less.clients) < len(whole.plan) + len(whole.clients)
    faults = {each.number for each in less.plan}
    clients = {each.name for each in less.clients}
    fewer = [less.only(faults - {fault}, clients) for fault in faults]
    fewer += [less.only(faults, clients - {client}) for client in clients]
    assert all(run(each).where != found.where for each in fewer)


def test_a_part_of_a_seed_says_how_to_run_it() -> None:
    whole = draw_scenario(3)
    assert whole.command == "trivium simulate --seed 3"
    part = whole.only({whole.plan[0].number}, set())
    assert part.command == "trivium simulate --seed 3 --faults 0 --clients none"
