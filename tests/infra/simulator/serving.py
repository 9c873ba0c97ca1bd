"""Conversations that arrive by chance, served by a simulated cluster to their ends."""

from infra.simulator.cluster import READY_MS, Cluster
from infra.simulator.traffic.poisson import Profile, poisson


def serve_all(
    cluster: Cluster, profile: Profile, *, per_s: float, duration_ms: float, seed: int
) -> Cluster:
    """Serve what begins within a time; the checkers have said their last word."""
    conversations = poisson(
        profile,
        per_s=per_s,
        duration_ms=duration_ms,
        begin_ms=READY_MS,
        block_tokens=cluster.setup.block_tokens,
        seed=[seed],
        name="c",
    )
    cluster.run(conversations)
    cluster.finish()
    return cluster
