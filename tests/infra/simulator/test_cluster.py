"""The simulated cluster around the real router: one seed one run, nothing lost, faults survived."""

from dataclasses import replace
from typing import Any

import pytest

from infra.simulator.checkers.credits import Credits
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Cluster, SimFault
from infra.simulator.faults import losses as faults
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile, unique_tokens
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from infra.simulator.traffic.script import SimTurn, conversation
from schemas.errors import PromptTooLong
from schemas.records import Mode, Orchestration
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all

SETUP = Setup()
PROFILE = Profile(
    first=TurnShape(input_tokens=1_500, output_tokens=40),
    later=TurnShape(input_tokens=200, output_tokens=60),
    turns=3,
)
POOLS = ClusterShape(prefill=2, decode=2)


def serve(
    shape: ClusterShape = POOLS,
    *,
    setup: Setup = SETUP,
    per_s: float = 8.0,
    seed: int = 1,
    strikes: tuple[SimFault, ...] = (),
    orchestrations: tuple[Orchestration, ...] = ORCHESTRATIONS,
    timeout_ms: int = 30_000,
    **settings: Any,
) -> Cluster:
    """Serve three-turn conversations that arrive within five seconds, under all checkers."""
    cluster = Cluster(
        shape,
        setup,
        RouterSettings(**{"policy": "static", "tick_ms": 100, **settings}),
        timeout_ms=timeout_ms,
        checkers=[OneOutcome(), Credits()],
        faults=strikes,
        orchestrations=orchestrations,
    )
    return serve_all(cluster, PROFILE, per_s=per_s, duration_ms=5_000.0, seed=seed)


def story(cluster: Cluster) -> list[tuple[object, ...]]:
    """Everything that clients saw."""
    return [
        (each.request_id, each.sent_ms, each.first_ms, each.ended_ms, each.outcome)
        for each in cluster.clients.requests
    ]


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (serve(policy="learned", seed=5) for _ in range(2))
    assert story(one) == story(other)
    assert story(one) != story(serve(policy="learned", seed=6))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("pools", ["1P1D", "2P2D", "1P1D1R"])
def test_every_request_is_answered_once(pools: str, share: float) -> None:
    cluster = serve(ClusterShape.parse(pools), local_share=share)
    assert all(each.completed for each in cluster.clients.requests)
    for worker in cluster.workers.values():
        state = worker.process.engine.state
        assert (
            not len(worker.process.requests) and not state.computations and not state.cache.pinned
        )
        assert state.gpu.batch == state.gpu.context_tokens == 0
    for each in cluster.clients.requests:
        assert each.outcome is not None and each.first_ms is not None
        assert each.sent_ms < each.first_ms <= (each.ended_ms or 0.0)
        assert each.outcome.completion_tokens == each.output_tokens


def test_replicas_alone_serve_and_move_nothing() -> None:
    cluster = serve(ClusterShape(replica=2), policy="replica")
    assert all(each.completed and each.mode is Mode.REPLICA for each in cluster.clients.requests)
    assert not cluster.links.moved_bytes


@pytest.mark.parametrize("orchestration", ["prefill_first", "decode_first", "concurrent"])
def test_orchestrations_move_the_same_bytes(orchestration: str) -> None:
    """What the receiver has is never sent; only who starts when differs."""
    cluster = serve(ClusterShape(prefill=1, decode=1), orchestration=orchestration)
    served = cluster.clients.requests
    assert all(each.completed for each in served)
    remote = {each.orchestration.value for each in served}
    assert remote == {orchestration}
    per_token = SETUP.model.kv_bytes_per_token
    for each in served:
        moved = cluster.links.moved_bytes[each.request_id] // per_token
        known = 0 if each.turn == 1 else each.prompt_tokens - PROFILE.later.input_tokens
        least = each.prompt_tokens - known
        if orchestration == "decode_first" and each.turn > 1:  # the answer is read back as well
            assert moved <= 2 * (least + SETUP.block_tokens) + PROFILE.later.output_tokens + 64
        else:
            assert least <= moved <= least + 2 * SETUP.block_tokens


def test_the_router_keeps_to_what_engines_can() -> None:
    cluster = serve(orchestrations=(Orchestration.PREFILL_FIRST,))
    assert {each.orchestration for each in cluster.clients.requests} == {
        Orchestration.PREFILL_FIRST
    }


def test_a_receiver_that_keeps_nothing_gets_the_whole_prompt() -> None:
    setup = replace(SETUP, receiver_keeps=False)
    cluster = serve(setup=setup, orchestration="prefill_first")
    for each in cluster.clients.requests:
        assert cluster.links.moved_bytes[each.request_id] == (
            each.prompt_tokens * setup.model.kv_bytes_per_token
        )


def test_local_turns_compute_only_what_is_new() -> None:
    cluster = serve(local_share=1.0)
    later = [each for each in cluster.clients.requests if each.turn > 1]
    assert {each.mode for each in later} == {Mode.LOCAL}
    assert not any(each.request_id in cluster.links.moved_bytes for each in later)
    for each in later:
        assert each.outcome is not None
        computed = each.prompt_tokens - each.outcome.cached_tokens
        assert computed <= PROFILE.later.input_tokens + SETUP.block_tokens + 1


def test_late_requests_expire_and_free_what_they_held() -> None:
    cluster = serve(ClusterShape(prefill=1, decode=1), per_s=40.0, timeout_ms=400)
    kinds = {each.completed for each in cluster.clients.requests}
    assert kinds == {True, False}
    cluster.clock.at(cluster.clock.now_ms + 60_000.0, lambda: None)
    while cluster.clock.now_ms < 65_000.0:
        cluster.clock.step()
    assert not any(worker.process.engine.state.cache.pinned for worker in cluster.workers.values())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
@pytest.mark.parametrize("orchestration", ["auto", "prefill_first", "concurrent"])
def test_a_dead_worker_loses_no_request(victim: str, orchestration: str) -> None:
    strikes = (faults.crash(3_000.0, victim), faults.restart(9_000.0, victim))
    cluster = serve(strikes=strikes, orchestration=orchestration, local_share=0.5)
    assert all(each.completed for each in cluster.clients.requests)
    assert any(each.attempt > 1 for each in cluster.clients.requests)


def test_slower_prefill_and_links_show() -> None:
    usual = serve(orchestration="prefill_first")
    slower = serve(
        strikes=(faults.slow_prefill(0.0, ["prefill-0", "prefill-1"], 3.0),),
        orchestration="prefill_first",
    )
    congested = serve(strikes=(faults.slow_links(0.0, 20.0),), orchestration="prefill_first")

    def first(cluster: Cluster) -> float:
        return sum(each.ttft_ms for each in cluster.clients.requests)

    def second(cluster: Cluster) -> float:
        return sum(each.decode_ttft_ms for each in cluster.clients.requests)

    assert first(slower) > 1.5 * first(usual)
    assert second(congested) - first(congested) > 3 * (second(usual) - first(usual))


def test_a_prompt_beyond_the_memory_fails_at_once() -> None:
    tokens = SETUP.kv_blocks * SETUP.block_tokens + 1
    cluster = Cluster(
        POOLS, SETUP, RouterSettings(policy="static"), checkers=[OneOutcome(), Credits()]
    )
    turn = SimTurn(prompt_tokens=tokens, output_tokens=1)
    said = conversation("big", READY_MS, [turn], unique_tokens(1, tokens + 1), SETUP.block_tokens)
    cluster.run([said])
    (served,) = cluster.clients.requests
    assert served.outcome is not None and not served.completed
    assert served.outcome.error is not None and served.outcome.error.code == PromptTooLong.code


def test_no_more_conversations_than_clients_hold() -> None:
    cluster = Cluster(
        POOLS, SETUP, RouterSettings(policy="static"), conversations_max=3, checkers=[OneOutcome()]
    )
    said = [
        conversation(
            f"c{number}",
            READY_MS,
            [
                SimTurn(prompt_tokens=100, output_tokens=20),
                SimTurn(prompt_tokens=200, output_tokens=20),
            ],
            unique_tokens(number, 220),
            SETUP.block_tokens,
        )
        for number in range(8)
    ]
    cluster.run(said)
    cluster.finish()
    spans: dict[str, list[float]] = {}
    for each in cluster.clients.requests:
        assert each.completed and each.ended_ms is not None
        began_ms, _ = spans.setdefault(each.session_id, [each.sent_ms, 0.0])
        spans[each.session_id] = [min(began_ms, each.sent_ms), each.ended_ms]
    assert len(spans) == 8
    for at_ms, _ in spans.values():
        assert sum(began <= at_ms < ended for began, ended in spans.values()) <= 3


def test_an_answer_that_is_not_found_again_is_computed_again() -> None:
    turns = [
        SimTurn(prompt_tokens=128, output_tokens=640),
        SimTurn(prompt_tokens=800, output_tokens=20),
    ]
    cached = {}
    for found in (True, False):
        setup = replace(SETUP, answers_found=found)
        cluster = Cluster(POOLS, setup, RouterSettings(policy="static", local_share=1.0))
        tokens = unique_tokens(7, 820)
        cluster.run([conversation("c", READY_MS, turns, tokens, SETUP.block_tokens)])
        outcome = cluster.clients.requests[-1].outcome
        assert outcome is not None and outcome.mode is Mode.LOCAL
        cached[found] = outcome.cached_tokens
    assert cached == {True: 704, False: 128}


def test_one_prompt_at_a_time_answers_the_first_sooner() -> None:
    """In steps of its own instead of one that holds both."""
    first_ms: dict[int, list[float]] = {}
    for most in (0, 1):
        setup = replace(SETUP, prefill_running_max=most)
        cluster = Cluster(ClusterShape(prefill=1, decode=1), setup, RouterSettings(policy="static"))
        turn = SimTurn(prompt_tokens=2_000, output_tokens=2)
        said = [
            conversation(
                str(number), READY_MS, [turn], unique_tokens(number, 2_002), SETUP.block_tokens
            )
            for number in range(3)  # the first begins a step alone, the others wait for it
        ]
        cluster.run(said)
        first_ms[most] = sorted(each.ttft_ms for each in cluster.clients.requests)
    assert first_ms[0][1] == first_ms[0][2]
    assert first_ms[1][1] < 0.8 * first_ms[0][1] and first_ms[1][2] >= first_ms[0][2]
