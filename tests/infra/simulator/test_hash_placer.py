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
    """Forty or so conversations of three turns, dealt by hash, or by the product's policy."""
    policy = in_turn or ("replica" if set(pools) <= set("R0123456789") else "static")
    settings = RouterSettings(policy=policy, local_share=share, orchestration="prefill_first")
    dealer = None if in_turn else HashPlacer(settings, salt)
    cluster = Cluster(ClusterShape.parse(pools), SETUP, settings, placer=dealer)
    serve_all(cluster, PROFILE, per_s=8.0, duration_ms=5_000.0, seed=1)
    assert all(each.completed for each in cluster.clients.requests)
    return cluster


def workers(cluster: Cluster) -> dict[str, list[tuple[str, str, Mode]]]:
    """Per conversation, turn by turn: prefill worker, decode worker or replica, mode."""
    found = defaultdict(list)
    for each in cluster.clients.requests:
        assert each.outcome is not None
        outcome = each.outcome
        found[each.session_id].append((outcome.prefill_worker, outcome.decode_worker, each.mode))
    return found


@pytest.mark.parametrize(("pools", "slots"), [("4R", 4), ("1P3D", 3), ("2P2D", 2), ("1P2D1R", 3)])
def test_a_conversation_stays_where_it_was_dealt(pools: str, slots: int) -> None:
    told = workers(serve(pools, 0.0))
    assert all(len(set(turns)) == 1 for turns in told.values())
    places = [turns[0][1] for turns in told.values()]
    counts = sorted(places.count(place) for place in set(places))
    assert len(counts) == slots
    assert counts[0] < counts[-1]  # by hash, not evenly
    assert told != workers(serve(pools, 0.0, salt="b"))


def test_a_pair_of_pools_of_one_size_is_dealt_as_pairs() -> None:
    pairs = {turns[0][:2] for turns in workers(serve("2P2D", 0.0)).values()}
    assert len(pairs) == 2


def test_a_share_of_the_decode_workers_computes_later_turns() -> None:
    told = workers(serve("1P3D", 2 / 3))
    for turns in told.values():
        assert turns[0][2] is Mode.REMOTE
        later = Mode.REMOTE if turns[0][1] == "decode-0" else Mode.LOCAL
        assert {mode for _, _, mode in turns[1:]} == {later}


def test_what_lived_on_a_dead_worker_is_dealt_among_the_living() -> None:
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
    assert len(served) == 3 * len(script) and all(each.completed for each in served)


def test_pairs_keep_to_each_other_and_get_conversations_in_turn() -> None:
    """Static 1P1D."""
    told = workers(serve("3P2D", 0.0, in_turn="pairs"))
    places = [set(turns) for turns in told.values()]
    assert all(len(place) == 1 for place in places)
    partners = {place.pop()[:2] for place in places}
    assert partners == {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}


def test_round_robin_gives_each_request_the_next_prefill_worker() -> None:
    """And each conversation the next decode worker, which keeps it."""
    cluster = serve("3P2D", 0.0, in_turn="round_robin")
    told = workers(cluster)
    assert all(len({turn[1] for turn in turns}) == 1 for turns in told.values())
    sent = [
        each.outcome for each in sorted(cluster.clients.requests, key=lambda each: each.sent_ms)
    ]
    names = [outcome.prefill_worker for outcome in sent if outcome is not None]
    assert names == [f"prefill-{number % 3}" for number in range(len(names))]
