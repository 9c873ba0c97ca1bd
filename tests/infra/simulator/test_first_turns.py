"""Where first turns go: chats of a single turn, on seeds that no rule was made with."""

import numpy as np
import pytest

from infra.simulator.checkers.credits import Credits
from infra.simulator.cluster import Cluster
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import Shape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import Shape as Turns
from schemas.records import Mode
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all

SETUP = Setup()
CHAT = Profile(
    first=Turns(input_tokens=1_000, output_tokens=200),
    later=Turns(input_tokens=1, output_tokens=1),
    turns=1,
)
POLICIES = ("static", "conditional", "learned")


def serve(pools: str, policy: str, seed: int, per_s: float = 16.0) -> Cluster:
    """Ten seconds of chats."""
    settings = RouterSettings(policy=policy, tick_ms=250)
    cluster = Cluster(Shape.parse(pools), SETUP, settings, checkers=[OneOutcome(), Credits()])
    return serve_all(cluster, CHAT, per_s=per_s, duration_ms=10_000.0, seed=seed)


def means(cluster: Cluster) -> tuple[float, float]:
    """TTFT and TPOT of all requests, in ms."""
    served = cluster.clients.served
    return (
        float(np.mean([each.ttft_ms for each in served])),
        float(np.mean([each.tpot_ms for each in served])),
    )


@pytest.mark.parametrize("pools", ["1P3D", "2P2D", "3P1D"])
def test_learned_finds_where_single_turns_belong(pools: str) -> None:
    """With one prefill worker most are better off without it, with three hardly any: within 3 % of
    the best policy, and first turns tell enough of themselves to learn that (issue 10, 29)."""
    found = {
        policy: [means(serve(pools, policy, seed)) for seed in (11, 12)] for policy in POLICIES
    }
    costs = {}
    for policy, runs in found.items():
        pairs = zip(runs, found["static"], strict=True)
        costs[policy] = np.mean([0.5 * t / t0 + 0.5 * p / p0 for (t, p), (t0, p0) in pairs])
    assert costs["learned"] <= 1.03 * min(costs.values())


@pytest.mark.parametrize("seed", [11, 12])
def test_workers_in_both_roles_answer_first_turns_alone(seed: int) -> None:
    """Remote means another worker and a transfer, and spares nobody (issue 10, 29)."""
    alone, split = serve("2B", "learned", seed, 6.0), serve("2B", "static", seed, 6.0)
    modes = [each.mode for each in alone.clients.served]
    assert set(modes) == {Mode.LOCAL} and not alone.links.moved_bytes
    assert {each.mode for each in split.clients.served} == {Mode.REMOTE}
    (ttft_alone, tpot_alone), (ttft_split, tpot_split) = means(alone), means(split)
    assert tpot_alone < tpot_split and ttft_alone < 1.02 * ttft_split
