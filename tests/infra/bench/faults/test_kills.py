"""Dynamo's protocol without a stack: what counts as failed, and what is asked."""

import random

from infra.bench.faults.http_clients import REFUSED, WHOLE, ClientAnswer, Once, Resuming
from infra.bench.faults.kills import PROMPT_WORDS, SCENARIOS, KillsOptions, _question, bars, figures

OPTIONS = KillsOptions(clients=1, requests=2)


def seen(client: str, ended: str = WHOLE, took_s: float = 1.0) -> ClientAnswer:
    return ClientAnswer(client=client, status=ended, asked_s=5.0, ended_s=5.0 + took_s)


def test_whatever_is_no_whole_answer_has_failed() -> None:
    scenario = next(each for each in SCENARIOS if each.name == "gateway")
    found = figures(
        [
            seen(Once.name),
            seen(Once.name, f"{REFUSED} 503"),
            seen(Resuming.name),
            seen(Resuming.name, took_s=9.0),
        ],
        OPTIONS,
        scenario,
    )
    assert found["of"] == 2
    assert [found[kind.name]["failed"] for kind in (Once, Resuming)] == [1, 0]
    assert found[Resuming.name]["answer_s_max"] == 9.0
    told = {bar.name: (bar.value, bar.met) for bar in bars({"gateway": found})}
    assert told == {
        "failed, gateway: with Last-Event-ID": (0, True),
        "failed, gateway: one try": (1, True),
    }


def test_every_kind_of_process_is_killed_once() -> None:
    victims = [victim.rpartition("-")[0] or victim for s in SCENARIOS for victim in s.victims]
    assert {"gateway", "router", "prefill", "decode", "broker"} == set(victims)
    first = _question(random.Random(1))
    assert len(first.messages[0]["content"].split()) == PROMPT_WORDS
    assert first == _question(random.Random(1)) != _question(random.Random(2))
