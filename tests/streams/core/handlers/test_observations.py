"""What the core tells placement of how requests went."""

from typing import Any

import pytest

from schemas.records import Orchestration, PhaseKind, WorkPhase
from streams.core.fleet.workers import Worker
from streams.core.placement.estimates import Estimates
from tests.streams.core.router_setups import brought_to, pairs, replicas, split, work_of

Observations = dict[str, list[tuple[Any, ...]]]


@pytest.fixture
def observations(monkeypatch: pytest.MonkeyPatch) -> Observations:
    """Every observation, by the name of the call; what follows the note."""
    calls: Observations = {"prefill_done": [], "transferred": [], "finished": []}

    def observe_prefill(self: Estimates, note: Any, *facts: Any) -> None:
        assert note is not None
        calls["prefill_done"].append(facts)

    def observe_transfer(self: Estimates, *facts: Any) -> None:
        calls["transferred"].append(facts)

    def observe_answer(self: Estimates, note: Any, worker: Worker, **facts: Any) -> None:
        assert note is not None
        calls["finished"].append((worker.life, worker.requests, facts))

    for spy in (observe_prefill, observe_transfer, observe_answer):
        monkeypatch.setattr(Estimates, spy.__name__, spy)
    return calls


@pytest.mark.parametrize("orchestration", [o for o in Orchestration if o.value != "none"])
def test_estimates_observe_phases_and_answer_of_remote_request(
    orchestration: Orchestration, observations: Observations
) -> None:
    on = pairs(orchestration)
    placed_ms = on.now_ms
    paired = orchestration is not Orchestration.PREFILL_FIRST
    brought_to(on, "paired" if paired else "prefilling", tokens=40)
    started_ms, on.now_ms = on.now_ms, on.now_ms + 100
    on.phase(
        work_of(on, WorkPhase.PREFILL),
        PhaseKind.PREFILL_DONE,
        started_ms=started_ms,
        cached_tokens=16,
        kv_bytes=64 if paired else 0,
        transfer_ms=30.0,
    )
    decode = work_of(on, WorkPhase.DECODE)
    if not paired:
        on.phase(decode, PhaseKind.KV_RECEIVED, kv_bytes=64, transfer_ms=30.0)
    on.now_ms += 150
    on.outcome(decode, first_token_ms=placed_ms + 100, cached_tokens=16, completion_tokens=16)
    twins = {name: len(calls) for name, calls in observations.items()}
    assert twins == {"prefill_done": 2, "transferred": 2, "finished": 2}
    (prefill, _), (transfer, _), (answer, _) = observations.values()
    assert prefill == (("p0", 1), 24, 70.0 if paired else 100.0)
    assert transfer == (40, 30.0)
    life, requests, facts = answer
    assert (life, requests) == (("d0", 1), 1)
    expected = (70.0, 12.0) if paired else (100.0, 10.0)  # a pair's first token is from prefill
    assert (facts["ttft_ms"], facts["tpot_ms"]) == expected
    assert (facts["computed_tokens"], facts["now_ms"]) == (24, on.now_ms)


def test_estimates_learn_nothing_from_answer_without_timing(observations: Observations) -> None:
    on = pairs(Orchestration.CONCURRENT)
    for number, completion_tokens in enumerate((1, 16)):
        brought_to(on, "paired", f"r{number}")
        decode = work_of(on, WorkPhase.DECODE, f"r{number}")
        first_token_ms = 0 if completion_tokens > 1 else on.now_ms
        on.outcome(decode, first_token_ms=first_token_ms, completion_tokens=completion_tokens)
    assert not observations["finished"]


@pytest.mark.parametrize(("took_ms", "tpot_ms"), [(250, 250.0), (10, 10.0), (0, 0.0), (-5, 0.0)])
def test_estimates_learn_token_time_from_two_tokens(
    took_ms: int, tpot_ms: float, observations: Observations
) -> None:
    on = replicas(1)
    on.request("r1")
    on.now_ms += 250
    on.outcome(on.works[0], first_token_ms=on.now_ms - took_ms, completion_tokens=2)
    *_, facts = observations["finished"][0]
    assert (facts["ttft_ms"], facts["tpot_ms"]) == (250.0 - took_ms, tpot_ms)


def test_estimates_learn_no_transfer_without_kv_bytes(observations: Observations) -> None:
    on = pairs(Orchestration.CONCURRENT)
    brought_to(on, "paired")
    on.phase(work_of(on, WorkPhase.PREFILL), PhaseKind.PREFILL_DONE, kv_bytes=0, transfer_ms=30.0)
    assert (
        observations["prefill_done"][0] == (("p0", 1), 10, 0.0) and not observations["transferred"]
    )


def test_estimates_learn_nothing_from_placements_of_earlier_router(
    observations: Observations,
) -> None:
    on = replicas(1)
    on.request("r1")
    on.taken_over()
    on.now_ms += 250
    on.outcome(on.works[0], first_token_ms=on.now_ms - 100, completion_tokens=16)
    assert not observations["finished"]


@pytest.mark.parametrize("ahead_ms", [0, -150, 150, 3_600_000])
def test_estimates_ignore_clock_difference_of_worker(
    ahead_ms: int, observations: Observations
) -> None:
    """Workers 150 ms behind would otherwise make append-prefill free."""
    on = replicas(1)
    on.request("r1")
    placed_ms, on.now_ms = on.now_ms, on.now_ms + 250
    on.outcome(
        on.works[0],
        first_token_ms=placed_ms + 100 + ahead_ms,
        ended_ms=placed_ms + 250 + ahead_ms,
        completion_tokens=16,
    )
    *_, facts = observations["finished"][0]
    assert (facts["ttft_ms"], facts["tpot_ms"]) == (100.0, 10.0)


@pytest.mark.parametrize("ahead_ms", [-150, 150])
def test_estimates_measure_remote_answer_by_router_clock(
    ahead_ms: int, observations: Observations
) -> None:
    """Its first token and its end are on two clocks."""
    on = split()
    on.request("r1")
    placed_ms, on.now_ms = on.now_ms, on.now_ms + 100
    on.phase(on.works[0], PhaseKind.PREFILL_DONE, started_ms=placed_ms, ended_ms=on.now_ms)
    on.now_ms += 150
    on.outcome(
        on.works[-1],
        first_token_ms=placed_ms + 100,
        ended_ms=on.now_ms + ahead_ms,
        completion_tokens=16,
    )
    *_, facts = observations["finished"][0]
    assert (facts["ttft_ms"], facts["tpot_ms"]) == (100.0, 10.0)
