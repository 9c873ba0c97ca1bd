"""Conversations dealt by hash: each stays on its workers, shares are those of workers."""

from collections import defaultdict

import pytest

from infra.simulator.cluster import READY_MS, Cluster
from infra.simulator.hash_placer import HashPlacer
from infra.simulator.machine.latency import Setup
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile, poisson
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from schemas.records import Mode
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all

SETUP = Setup(prefill_credits=256)
PROFILE = Profile(
    first=TurnShape(input_tokens=200, output_tokens=20),
    later=TurnShape(input_tokens=30, output_tokens=20),
    turns=3,
    think_ms=0.0,
)


def serve(pools: str, share: float, salt: str = "a", *, in_turn: str = "") -> Cluster:
    """Serve about forty conversations of three turns, placed by hash or by a policy."""
    policy = in_turn or ("replica" if set(pools) <= set("R0123456789") else "static")
    settings = RouterSettings(policy=policy, local_share=share, orchestration="prefill_first")
    dealer = None if in_turn else HashPlacer(settings, salt)
    cluster = Cluster(ClusterShape.parse(pools), SETUP, settings, placer=dealer)
    serve_all(cluster, PROFILE, per_s=8.0, duration_ms=5_000.0, seed=1)
    assert all(request.completed for request in cluster.clients.requests)
    return cluster


def workers(cluster: Cluster) -> dict[str, list[tuple[str, str, Mode]]]:
    """Return prefill worker, decode worker and mode of each turn, per conversation."""
    turns_by_session = defaultdict(list)
    for request in cluster.clients.requests:
        assert request.outcome is not None
        outcome = request.outcome
        turns_by_session[request.session_id].append(
            (outcome.prefill_worker, outcome.decode_worker, request.mode)
        )
    return turns_by_session


@pytest.mark.parametrize(("pools", "slots"), [("4R", 4), ("1P3D", 3), ("2P2D", 2), ("1P2D1R", 3)])
def test_hash_placer_keeps_conversation_on_its_worker(pools: str, slots: int) -> None:
    turns_by_session = workers(serve(pools, 0.0))
    assert all(len(set(turns)) == 1 for turns in turns_by_session.values())
    places = [turns[0][1] for turns in turns_by_session.values()]
    counts = sorted(places.count(place) for place in set(places))
    assert len(counts) == slots
    assert counts[0] < counts[-1]  # by hash, not evenly
    assert turns_by_session != workers(serve(pools, 0.0, salt="b"))


def test_hash_placer_pairs_pools_of_equal_size() -> None:
    pairs = {turns[0][:2] for turns in workers(serve("2P2D", 0.0)).values()}
    assert len(pairs) == 2


def test_hash_placer_keeps_later_turns_on_share_of_decode_workers() -> None:
    turns_by_session = workers(serve("1P3D", 2 / 3))
    for turns in turns_by_session.values():
        assert turns[0][2] is Mode.REMOTE
        later = Mode.REMOTE if turns[0][1] == "decode-0" else Mode.LOCAL
        assert {mode for _, _, mode in turns[1:]} == {later}


def test_hash_placer_moves_conversations_off_dead_worker() -> None:
    settings = RouterSettings(policy="static", orchestration="prefill_first")
    cluster = Cluster(ClusterShape.parse("1P2D"), SETUP, settings, placer=HashPlacer(settings, "a"))
    script = poisson(
        PROFILE,
        per_s=4.0,
        duration_ms=5_000.0,
        begin_ms=READY_MS,
        block_tokens=SETUP.block_tokens,
        seed=[1],
        name="c",
    )
    cluster.clock.at(READY_MS + 2_000.0, cluster.workers["decode-0"].crash)
    cluster.run(script)
    served = cluster.clients.requests
    assert len(served) == 3 * len(script) and all(request.completed for request in served)


def test_pairs_policy_keeps_fixed_worker_pairs() -> None:
    """The policy is the static 1P1D of the literature."""
    turns_by_session = workers(serve("3P2D", 0.0, in_turn="pairs"))
    places = [set(turns) for turns in turns_by_session.values()]
    assert all(len(place) == 1 for place in places)
    partners = {place.pop()[:2] for place in places}
    assert partners == {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}


def test_round_robin_policy_rotates_prefill_workers_per_request() -> None:
    """Conversations rotate over decode workers, and each keeps its own."""
    cluster = serve("3P2D", 0.0, in_turn="round_robin")
    turns_by_session = workers(cluster)
    assert all(len({turn[1] for turn in turns}) == 1 for turns in turns_by_session.values())
    outcomes = [
        request.outcome
        for request in sorted(cluster.clients.requests, key=lambda request: request.sent_ms)
    ]
    names = [outcome.prefill_worker for outcome in outcomes if outcome is not None]
    assert names == [f"prefill-{number % 3}" for number in range(len(names))]
