"""What the core tells placement of how requests went."""

from typing import Any

import pytest

from schemas.records import Orchestration, PhaseKind, WorkPhase
from streams.core.fleet.workers import Worker
from streams.core.placement.estimates import Estimates
from tests.streams.core.router_setups import brought_to, pairs, replicas, split, work_of

Told = dict[str, list[tuple[Any, ...]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Every observation, by the name of the call; what follows the note."""
    found: Told = {"prefill_done": [], "transferred": [], "finished": []}

    def observe_prefill(self: Estimates, note: Any, *facts: Any) -> None:
        assert note is not None
        found["prefill_done"].append(facts)

    def observe_transfer(self: Estimates, *facts: Any) -> None:
        found["transferred"].append(facts)

    def observe_answer(self: Estimates, note: Any, worker: Worker, **facts: Any) -> None:
        assert note is not None
        found["finished"].append((worker.life, worker.requests, facts))

    for spy in (observe_prefill, observe_transfer, observe_answer):
        monkeypatch.setattr(Estimates, spy.__name__, spy)
    return found


@pytest.mark.parametrize("orchestration", [o for o in Orchestration if o.value != "none"])
def test_a_remote_request_tells_its_phases_and_its_answer(
    orchestration: Orchestration, told: Told
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
    twins = {name: len(calls) for name, calls in told.items()}
    assert twins == {"prefill_done": 2, "transferred": 2, "finished": 2}
    (prefill, _), (transfer, _), (answer, _) = told.values()
    assert prefill == (("p0", 1), 24, 70.0 if paired else 100.0)
    assert transfer == (40, 30.0)
    life, requests, facts = answer
    assert (life, requests) == (("d0", 1), 1)
    expected = (70.0, 12.0) if paired else (100.0, 10.0)  # a pair's first token is from prefill
    assert (facts["ttft_ms"], facts["tpot_ms"]) == expected
    assert (facts["computed_tokens"], facts["now_ms"]) == (24, on.now_ms)


def test_nothing_is_learned_of_an_answer_that_says_nothing(told: Told) -> None:
    on = pairs(Orchestration.CONCURRENT)
    for number, completion_tokens in enumerate((1, 16)):
        brought_to(on, "paired", f"r{number}")
        decode = work_of(on, WorkPhase.DECODE, f"r{number}")
        first_token_ms = 0 if completion_tokens > 1 else on.now_ms
        on.outcome(decode, first_token_ms=first_token_ms, completion_tokens=completion_tokens)
    assert not told["finished"]


@pytest.mark.parametrize(("took_ms", "tpot_ms"), [(250, 250.0), (10, 10.0), (0, 0.0), (-5, 0.0)])
def test_two_tokens_tell_how_long_one_takes(took_ms: int, tpot_ms: float, told: Told) -> None:
    on = replicas(1)
    on.request("r1")
    on.now_ms += 250
    on.outcome(on.works[0], first_token_ms=on.now_ms - took_ms, completion_tokens=2)
    *_, facts = told["finished"][0]
    assert (facts["ttft_ms"], facts["tpot_ms"]) == (250.0 - took_ms, tpot_ms)


def test_nothing_is_learned_of_kv_that_no_phase_tells_of(told: Told) -> None:
    on = pairs(Orchestration.CONCURRENT)
    brought_to(on, "paired")
    on.phase(work_of(on, WorkPhase.PREFILL), PhaseKind.PREFILL_DONE, kv_bytes=0, transfer_ms=30.0)
    assert told["prefill_done"][0] == (("p0", 1), 10, 0.0) and not told["transferred"]


def test_nothing_is_learned_of_what_a_router_before_this_one_has_placed(told: Told) -> None:
    on = replicas(1)
    on.request("r1")
    on.taken_over()
    on.now_ms += 250
    on.outcome(on.works[0], first_token_ms=on.now_ms - 100, completion_tokens=16)
    assert not told["finished"]


@pytest.mark.parametrize("ahead_ms", [0, -150, 150, 3_600_000])
def test_nothing_is_learned_from_clocks_that_differ(ahead_ms: int, told: Told) -> None:
    """Workers 150 ms behind would make append-prefill free."""
    on = replicas(1)
    on.request("r1")
    placed_ms, on.now_ms = on.now_ms, on.now_ms + 250
    on.outcome(
        on.works[0],
        first_token_ms=placed_ms + 100 + ahead_ms,
        ended_ms=placed_ms + 250 + ahead_ms,
        completion_tokens=16,
    )
    *_, facts = told["finished"][0]
    assert (facts["ttft_ms"], facts["tpot_ms"]) == (100.0, 10.0)


@pytest.mark.parametrize("ahead_ms", [-150, 150])
def test_a_remote_answer_is_measured_by_the_router(ahead_ms: int, told: Told) -> None:
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
    *_, facts = told["finished"][0]
    assert (facts["ttft_ms"], facts["tpot_ms"]) == (100.0, 10.0)
