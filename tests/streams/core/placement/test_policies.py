"""Policies alone: shares, tables, the rules of learning; and `learned` in a world of its own."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.records import Estimate, Mode, Reason
from streams.config import POLICIES, RouterSettings
from streams.core.placement.placer import Placer
from streams.core.placement.policies.conditional import ConditionalPolicy
from streams.core.placement.policies.fixed import StaticPolicy
from streams.core.placement.policies.learned import LearnedPolicy
from streams.core.placement.policies.policy import Choice, PlacementTurn, load_policies
from streams.core.placement.policies.table import TablePolicy
from streams.core.placement.ppd_table import PpdCell, PpdTable
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session
from tests.streams.core.placement.queue_simulation import Laws, QueueSimulation, simulated


def turn(ticket: int = 1, **changes: Any) -> PlacementTurn:
    values: dict[str, Any] = {
        "ticket": ticket,
        "prompt_tokens": 1_200,
        "context_tokens": 1_000,
        "append_tokens": 200,
        "prefill_tokens": 1_200,
        "max_tokens": 100,
        "prefill_queue": 0.0,
        "load": 1.0,
        "slack_ms": 60_000,
        "w_ttft": 0.5,
        "w_tpot": 0.5,
    }
    return PlacementTurn(**{**values, **changes})


def estimate(score: float, samples: int = 100) -> Estimate:
    return Estimate(ttft_local_ms=100, ttft_remote_ms=100, score=score, samples=samples)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_for_any_turn(name: str) -> None:
    policies = load_policies(RouterSettings(), PpdTable(EDGES, CELLS))
    choice = policies[name].choose(turn(estimate=estimate(0.1)))
    assert isinstance(choice, Choice) and choice.reason is not Reason.UNKNOWN


@given(
    st.sampled_from([0.0, 1 / 3, 0.5, 2 / 3, 1.0]), st.integers(0, 10_000), st.integers(1, 2_000)
)
def test_static_policy_meets_share_in_any_run_of_requests(
    share: float, first: int, count: int
) -> None:
    policy = StaticPolicy(RouterSettings(policy="static", local_share=share))
    choices = [policy.choose(turn(ticket)) for ticket in range(first, first + count)]
    local = sum(choice.local for choice in choices)
    assert abs(local - share * count) <= 4
    assert {choice.reason for choice in choices} == {Reason.FIXED_SHARE}


def test_policy_choice_stays_while_request_waits() -> None:
    scene = pair(policy="static", local_share=0.5)
    scene.beat(p0=0, d0=0)
    waiting = [case(session=session()) for _ in range(8)]
    for _ in range(3):
        assert [scene.place(request_case) for request_case in waiting] == [None] * 8
    scene.beat(p0=8, d0=8)
    modes = [scene.take(request_case).mode for request_case in waiting]
    assert modes.count(Mode.LOCAL) == 4
    tickets = [request_case.ticket for request_case in waiting]
    assert tickets == list(range(1, 9))


EDGES = {
    "context_tokens": [1_000, 4_000],
    "new_tokens": [256],
    "answer_tokens": [64, 256],
    "load": [1, 4],
}


def cell(*at: int, gain: float = 0.5, loss: float = 0.1, samples: int = 10) -> PpdCell:
    return PpdCell(
        bin=(at[0], at[1], at[2], at[3]), gain_ttft=gain, loss_tpot=loss, samples=samples
    )


CELLS = [
    cell(1, 0, 1, 1),
    cell(1, 1, 1, 1, gain=-0.3),
    cell(1, 0, 1, 2, gain=0.2, loss=0.4),
    cell(2, 0, 0, 0, gain=0.1, loss=0.1),
]


@pytest.mark.parametrize(
    ("changes", "local", "reason", "samples"),
    [
        ({}, True, Reason.TABLE, 10),
        ({"prompt_tokens": 1_600}, False, Reason.TABLE, 10),
        ({"load": 9.0}, False, Reason.TABLE, 10),
        ({"load": 9.0, "w_ttft": 0.9, "w_tpot": 0.1}, True, Reason.TABLE, 10),
        ({"load": 0.0}, True, Reason.TABLE, 10),  # nearest: one load bin above
        ({"max_tokens": 1_000, "load": 9.0}, False, Reason.TABLE, 10),
        ({"context_tokens": 5_000, "prompt_tokens": 9_000}, False, Reason.TABLE, 10),
        ({"context_tokens": 10}, False, Reason.TOO_LITTLE_KNOWN, 0),
    ],
)
def test_table_policy_chooses_by_nearest_cell(
    changes: dict[str, Any], local: bool, reason: Reason, samples: int
) -> None:
    choice = TablePolicy(RouterSettings(), PpdTable(EDGES, CELLS)).choose(turn(**changes))
    assert (choice.local, choice.reason) == (local, reason)
    estimate = choice.estimate
    assert (estimate.samples if estimate else 0) == samples
    if estimate is not None:
        weights = turn(**changes)
        score = weights.w_ttft * estimate.gain_ttft - weights.w_tpot * estimate.loss_tpot
        assert score == pytest.approx(estimate.score)


def test_table_finds_same_cell_every_time() -> None:
    table = PpdTable(EDGES, CELLS)
    for at in ((1, 0, 1, 2), (1, 0, 1, 0), (0, 0, 0, 0)):
        assert table.find(at) == table.find(at)
    assert table.find((1, 0, 1, 2)) == table.cells[1, 0, 1, 2]
    assert table.find((0, 0, 0, 0)) is None


def test_table_round_trips_through_dictionary() -> None:
    table = PpdTable(EDGES, CELLS)
    copy = PpdTable.from_dict(table.to_dict())
    assert copy.to_dict() == table.to_dict()
    assert copy.cells == table.cells
    assert copy.bin_of(1_000, 255, 64, 3.9) == (1, 0, 1, 1)


GOOD = PpdTable(EDGES, CELLS).to_dict()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "table: expected edges of context_tokens.* found KeyError.*trivium plan ppd"),
        ({**GOOD, "edges": {**EDGES, "load": [4, 1]}}, "rising edges of load, found"),
        ({**GOOD, "cells": GOOD["cells"] * 2}, "expected each bin below"),
        ({**GOOD, "cells": [{**GOOD["cells"][0], "bin": [9, 0, 0, 0]}]}, "expected each bin below"),
        ({**GOOD, "cells": [{**GOOD["cells"][0], "gain_ttft": "nan"}]}, "nan is not finite"),
        ({**GOOD, "edges": {**EDGES, "load": range(10_000)}}, "expected at most 100000 bins"),
    ],
)
def test_table_rejects_bad_content(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PpdTable.from_dict(content)


def test_table_policy_requires_table() -> None:
    with pytest.raises(ConfigError, match="router.table: expected the file .* found none"):
        Placer(RouterSettings(policy="table"))
    scene = PlacerFixture(policy="table", table=PpdTable(EDGES, CELLS))
    assert scene.placer.settings.policy == "table"


def test_learned_policy_falls_back_with_too_few_samples() -> None:
    settings = RouterSettings(samples_min=20, explore_share=0.0)
    learned, fallback = LearnedPolicy(settings), ConditionalPolicy(settings)
    for tokens in (200, 2_000):
        placement_turn = turn(append_tokens=tokens, estimate=estimate(1.0, samples=19))
        assert learned.choose(placement_turn).local == fallback.choose(placement_turn).local
        assert learned.choose(placement_turn).reason is Reason.TOO_LITTLE_KNOWN
    for score in (0.1, -0.1):
        sure_estimate = estimate(score, samples=20)
        expected = Choice(score > 0, Reason.LEARNED, sure_estimate)
        assert learned.choose(turn(estimate=sure_estimate)) == expected


@given(st.floats(0.0, 0.5), st.integers(1, 3_000))
def test_learned_policy_explores_no_more_than_its_share(share: float, count: int) -> None:
    learned = LearnedPolicy(RouterSettings(explore_share=share))
    sure_estimate = estimate(0.5)
    choices = [
        learned.choose(turn(ticket, estimate=sure_estimate)) for ticket in range(1, count + 1)
    ]
    explored = [choice for choice in choices if choice.reason is Reason.EXPLORING]
    assert share * count - 1 <= len(explored) <= share * count
    assert not any(choice.local for choice in explored)


def test_learned_policy_explores_nothing_when_time_is_short() -> None:
    learned = LearnedPolicy(RouterSettings(explore_share=1.0, explore_slack_ms=5_000))
    sure_estimate = estimate(0.5)
    assert learned.choose(turn(slack_ms=5_000, estimate=sure_estimate)).reason is Reason.EXPLORING
    assert learned.choose(turn(slack_ms=4_999, estimate=sure_estimate)).reason is Reason.LEARNED
    slow = replace(sure_estimate, ttft_remote_ms=2_000.0)
    assert learned.choose(turn(slack_ms=5_000, estimate=slow)).reason is Reason.LEARNED


LOCAL_BETTER = Laws(stall=0.05)
REMOTE_BETTER = Laws(stall=1.0, append_base=40, append_token=0.1)
CLOSE = Laws(stall=0.1, append_base=40, append_token=0.12)
BUSY: dict[str, Any] = {
    "per_s": 10.0,
    "later_share": 0.6,
    "new_tokens": 500,
    "answer": 60,
    "context": 500,
}


def cost(run: QueueSimulation, base: tuple[float, float], first: int) -> float:
    """Of later turns from the first on, with equal weights; 1 for the base."""
    ttft_ms, tpot_ms = run.means(first)
    return 0.5 * ttft_ms / base[0] + 0.5 * tpot_ms / base[1]


@pytest.mark.parametrize(("laws", "local"), [(LOCAL_BETTER, True), (REMOTE_BETTER, False)])
def test_learned_policy_finds_better_mode(laws: Laws, local: bool) -> None:
    runs = {}
    for policy, share in (("static", 0.0), ("static", 1.0), ("learned", 0.0)):
        runs[policy, share] = simulated(replace(laws), policy=policy, local_share=share)
        runs[policy, share].run(500, **BUSY)
    base = runs["static", 0.0].means(100)
    costs = {key: cost(run, base, 100) for key, run in runs.items()}
    learned = runs["learned", 0.0]
    assert (costs["static", 1.0] < costs["static", 0.0]) == local
    assert costs["learned", 0.0] <= 1.05 * min(costs.values())
    assert learned.local_share(100) > 0.8 if local else learned.local_share(100) < 0.1
    assert 0 < learned.explored() <= 0.02 * len(learned.later())


@pytest.mark.parametrize("seed", [1, 2])
def test_learned_policy_follows_change_within_200_requests(seed: int) -> None:
    laws = replace(CLOSE)
    traffic = {**BUSY, "per_s": 6.0, "new_tokens": 800}
    run = simulated(laws, seed=seed, policy="learned")
    run.run(400, **traffic)
    before = len(run.later())
    assert run.local_share(before - 150) < 0.15
    laws.prefill_base, laws.prefill_token = 2 * laws.prefill_base, 2 * laws.prefill_token
    run.run(400, **traffic)
    assert run.local_share(before + 50, before + 140) > 0.6
    after = len(run.later())
    laws.prefill_base, laws.prefill_token = laws.prefill_base / 2, laws.prefill_token / 2
    run.run(400, **traffic)
    assert run.local_share(after + 60, after + 140) < 0.2


def test_learned_policy_is_deterministic() -> None:
    runs = [simulated(replace(CLOSE), policy="learned", seed=5) for _ in range(2)]
    for run in runs:
        run.run(200, **BUSY)
    placements = [
        [(t.placed.mode, t.placed.reason, t.placed.estimate) for t in run.placed] for run in runs
    ]
    assert placements[0] == placements[1]


def test_weights_shift_choice_of_learned_policy() -> None:
    laws = Laws(stall=1.0, append_token=0.06, append_base=20)
    shares = []
    for weights in ("1/0", "0/1"):
        run = simulated(laws, policy="learned", weights_standard=weights)
        run.run(300, **BUSY)
        shares.append(run.local_share(80))
    assert shares[0] > 0.8
    assert shares[1] < 0.2


def test_placer_without_table_lists_all_other_policies() -> None:
    assert set(Placer(RouterSettings()).policies) == set(POLICIES) - {"table"}
