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
    """Return what clients saw of each request."""
    return [
        (request.request_id, request.sent_ms, request.first_ms, request.ended_ms, request.outcome)
        for request in cluster.clients.requests
    ]


def test_cluster_repeats_run_for_same_seed() -> None:
    first, second = (serve(policy="learned", seed=5) for _ in range(2))
    assert story(first) == story(second)
    assert story(first) != story(serve(policy="learned", seed=6))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("pools", ["1P1D", "2P2D", "1P1D1R"])
def test_cluster_answers_every_request_once(pools: str, share: float) -> None:
    cluster = serve(ClusterShape.parse(pools), local_share=share)
    assert all(request.completed for request in cluster.clients.requests)
    for worker in cluster.workers.values():
        state = worker.process.engine.state
        assert (
            not len(worker.process.requests) and not state.computations and not state.cache.pinned
        )
        assert state.gpu.batch == state.gpu.context_tokens == 0
    for request in cluster.clients.requests:
        assert request.outcome is not None and request.first_ms is not None
        assert request.sent_ms < request.first_ms <= (request.ended_ms or 0.0)
        assert request.outcome.completion_tokens == request.output_tokens


def test_replica_cluster_serves_without_kv_transfer() -> None:
    cluster = serve(ClusterShape(replica=2), policy="replica")
    assert all(
        request.completed and request.mode is Mode.REPLICA for request in cluster.clients.requests
    )
    assert not cluster.links.moved_bytes


@pytest.mark.parametrize("orchestration", ["prefill_first", "decode_first", "concurrent"])
def test_orchestration_transfers_only_missing_kv(orchestration: str) -> None:
    """The receiver's tokens are never sent, whichever side starts first."""
    cluster = serve(ClusterShape(prefill=1, decode=1), orchestration=orchestration)
    served = cluster.clients.requests
    assert all(request.completed for request in served)
    remote = {request.orchestration.value for request in served}
    assert remote == {orchestration}
    per_token = SETUP.model.kv_bytes_per_token
    for request in served:
        moved = cluster.links.moved_bytes[request.request_id] // per_token
        cached_tokens = (
            0 if request.turn == 1 else request.prompt_tokens - PROFILE.later.input_tokens
        )
        min_tokens = request.prompt_tokens - cached_tokens
        if orchestration == "decode_first" and request.turn > 1:  # the answer is read back as well
            assert moved <= 2 * (min_tokens + SETUP.block_tokens) + PROFILE.later.output_tokens + 64
        else:
            assert min_tokens <= moved <= min_tokens + 2 * SETUP.block_tokens


def test_router_uses_only_supported_orchestrations() -> None:
    cluster = serve(orchestrations=(Orchestration.PREFILL_FIRST,))
    assert {request.orchestration for request in cluster.clients.requests} == {
        Orchestration.PREFILL_FIRST
    }


def test_receiver_without_kv_cache_gets_whole_prompt() -> None:
    setup = replace(SETUP, receiver_keeps=False)
    cluster = serve(setup=setup, orchestration="prefill_first")
    for request in cluster.clients.requests:
        assert cluster.links.moved_bytes[request.request_id] == (
            request.prompt_tokens * setup.model.kv_bytes_per_token
        )


def test_local_turn_computes_only_new_tokens() -> None:
    cluster = serve(local_share=1.0)
    later = [request for request in cluster.clients.requests if request.turn > 1]
    assert {request.mode for request in later} == {Mode.LOCAL}
    assert not any(request.request_id in cluster.links.moved_bytes for request in later)
    for request in later:
        assert request.outcome is not None
        computed = request.prompt_tokens - request.outcome.cached_tokens
        assert computed <= PROFILE.later.input_tokens + SETUP.block_tokens + 1


def test_expired_request_frees_its_blocks() -> None:
    cluster = serve(ClusterShape(prefill=1, decode=1), per_s=40.0, timeout_ms=400)
    kinds = {request.completed for request in cluster.clients.requests}
    assert kinds == {True, False}
    cluster.clock.at(cluster.clock.now_ms + 60_000.0, lambda: None)
    while cluster.clock.now_ms < 65_000.0:
        cluster.clock.step()
    assert not any(worker.process.engine.state.cache.pinned for worker in cluster.workers.values())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
@pytest.mark.parametrize("orchestration", ["auto", "prefill_first", "concurrent"])
def test_worker_crash_loses_no_request(victim: str, orchestration: str) -> None:
    strikes = (SimFault(3_000.0, faults.crash, victim), SimFault(9_000.0, faults.restart, victim))
    cluster = serve(strikes=strikes, orchestration=orchestration, local_share=0.5)
    assert all(request.completed for request in cluster.clients.requests)
    assert any(request.attempt > 1 for request in cluster.clients.requests)


def test_slow_prefill_and_slow_links_delay_first_tokens() -> None:
    usual = serve(orchestration="prefill_first")
    slower = serve(
        strikes=tuple(
            SimFault(0.0, faults.slow_prefill, name, 3.0) for name in ("prefill-0", "prefill-1")
        ),
        orchestration="prefill_first",
    )
    strikes = (SimFault(0.0, faults.slow_links, 20.0),)
    congested = serve(strikes=strikes, orchestration="prefill_first")

    def first(cluster: Cluster) -> float:
        return sum(request.ttft_ms for request in cluster.clients.requests)

    def second(cluster: Cluster) -> float:
        return sum(request.decode_ttft_ms for request in cluster.clients.requests)

    assert first(slower) > 1.5 * first(usual)
    assert second(congested) - first(congested) > 3 * (second(usual) - first(usual))


def test_cluster_fails_prompt_beyond_kv_memory() -> None:
    tokens = SETUP.kv_blocks * SETUP.block_tokens + 1
    cluster = Cluster(
        POOLS, SETUP, RouterSettings(policy="static"), checkers=[OneOutcome(), Credits()]
    )
    turn = SimTurn(prompt_tokens=tokens, output_tokens=1)
    chat = conversation("big", READY_MS, [turn], unique_tokens(1, tokens + 1), SETUP.block_tokens)
    cluster.run([chat])
    (served,) = cluster.clients.requests
    assert served.outcome is not None and not served.completed
    assert served.outcome.error is not None and served.outcome.error.code == PromptTooLong.code


def test_clients_limit_concurrent_conversations() -> None:
    cluster = Cluster(
        POOLS, SETUP, RouterSettings(policy="static"), conversations_max=3, checkers=[OneOutcome()]
    )
    chats = [
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
    cluster.run(chats)
    cluster.finish()
    spans: dict[str, list[float]] = {}
    for request in cluster.clients.requests:
        assert request.completed and request.ended_ms is not None
        began_ms, _ = spans.setdefault(request.session_id, [request.sent_ms, 0.0])
        spans[request.session_id] = [min(began_ms, request.sent_ms), request.ended_ms]
    assert len(spans) == 8
    for at_ms, _ in spans.values():
        assert sum(begin_ms <= at_ms < end_ms for begin_ms, end_ms in spans.values()) <= 3


def test_uncached_answer_is_computed_again_in_next_turn() -> None:
    turns = [
        SimTurn(prompt_tokens=128, output_tokens=640),
        SimTurn(prompt_tokens=800, output_tokens=20),
    ]
    cached = {}
    for is_found in (True, False):
        setup = replace(SETUP, answers_found=is_found)
        cluster = Cluster(POOLS, setup, RouterSettings(policy="static", local_share=1.0))
        tokens = unique_tokens(7, 820)
        cluster.run([conversation("c", READY_MS, turns, tokens, SETUP.block_tokens)])
        outcome = cluster.clients.requests[-1].outcome
        assert outcome is not None and outcome.mode is Mode.LOCAL
        cached[is_found] = outcome.cached_tokens
    assert cached == {True: 704, False: 128}


def test_prefill_limit_of_one_shortens_ttft() -> None:
    """Each prompt has steps of its own instead of steps that hold both."""
    first_ms: dict[int, list[float]] = {}
    for running_max in (0, 1):
        setup = replace(SETUP, prefill_running_max=running_max)
        cluster = Cluster(ClusterShape(prefill=1, decode=1), setup, RouterSettings(policy="static"))
        turn = SimTurn(prompt_tokens=2_000, output_tokens=2)
        chats = [
            conversation(
                str(number), READY_MS, [turn], unique_tokens(number, 2_002), SETUP.block_tokens
            )
            for number in range(3)  # the first begins a step alone, the others wait for it
        ]
        cluster.run(chats)
        first_ms[running_max] = sorted(request.ttft_ms for request in cluster.clients.requests)
    assert first_ms[0][1] == first_ms[0][2]
    assert first_ms[1][1] < 0.8 * first_ms[0][1] and first_ms[1][2] >= first_ms[0][2]
