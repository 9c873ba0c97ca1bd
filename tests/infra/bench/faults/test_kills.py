"""Dynamo's protocol without a stack: what counts as failed, and what is asked."""

import random

from infra.bench.faults.http_clients import REFUSED, WHOLE, ClientAnswer, Once, Resuming
from infra.bench.faults.kills import PROMPT_WORDS, SCENARIOS, KillsOptions, _question, bars, figures

OPTIONS = KillsOptions(clients=1, requests=2)


def client_answer(client: str, status: str = WHOLE, took_s: float = 1.0) -> ClientAnswer:
    return ClientAnswer(client=client, status=status, asked_s=5.0, ended_s=5.0 + took_s)


def test_figures_count_incomplete_answers_as_failed() -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "gateway")
    scenario_figures = figures(
        [
            client_answer(Once.name),
            client_answer(Once.name, f"{REFUSED} 503"),
            client_answer(Resuming.name),
            client_answer(Resuming.name, took_s=9.0),
        ],
        OPTIONS,
        scenario,
    )
    assert scenario_figures["of"] == 2
    assert [scenario_figures[kind.name]["failed"] for kind in (Once, Resuming)] == [1, 0]
    assert scenario_figures[Resuming.name]["answer_s_max"] == 9.0
    bar_values = {bar.name: (bar.value, bar.met) for bar in bars({"gateway": scenario_figures})}
    assert bar_values == {
        "failed, gateway: with Last-Event-ID": (0, True),
        "failed, gateway: one try": (1, True),
    }


def test_scenarios_kill_all_process_kinds() -> None:
    victims = [victim.rpartition("-")[0] or victim for s in SCENARIOS for victim in s.victims]
    assert {"gateway", "router", "prefill", "decode", "broker"} == set(victims)
    first = _question(random.Random(1))
    assert len(first.messages[0]["content"].split()) == PROMPT_WORDS
    assert first == _question(random.Random(1)) != _question(random.Random(2))
