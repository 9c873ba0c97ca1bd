"""Heals all faults: restarts what was lost, wakes what slept, resets clocks, links and the log."""

from infra.simulator.cluster import Cluster
from schemas.fleet import LEASE_MS


def heal(cluster: Cluster) -> None:
    """Heal all faults of a cluster."""
    bus = cluster.bus
    bus.delay_ms, bus.held_until_ms = cluster.setup.bus_ms, 0.0
    for pending in (bus.slow, bus.repeat_after_ms, bus.repeated_topics, bus.losing):
        pending.clear()
    cluster.links.slow, cluster.exchange.failures = 1.0, 0
    _heal_workers(cluster)
    while cluster.router.is_asleep:  # twice if it slept and was replaced by one that sleeps
        cluster.router.wake()
    if not cluster.router.alive:
        cluster.router.take_over()
        cluster.members.join_router()
    for name, gateway in cluster.gateways.by_id.items():
        if gateway.is_cut:
            cluster.members.join_gateway(cluster.gateways.join_again(name))
        elif not gateway.alive:
            cluster.members.join_gateway(cluster.gateways.restart(name))


def _heal_workers(cluster: Cluster) -> None:
    for name, _ in cluster.shape.roles():
        worker = cluster.workers[name]
        worker.wall.ahead_ms, worker.is_mute = 0.0, False
        late = cluster.clock.now_ms - worker.beat_ms >= LEASE_MS
        if not worker.alive:
            worker.restart()
            cluster.members.join(worker)
        elif late or worker.process.requests.draining:
            cluster.members.rejoin(worker)
        elif worker.clock.is_asleep:
            worker.clock.wake()
        worker.clear_slowdown()
