"""What can go wrong in a simulated cluster, as `Fault` objects for its clock."""

from infra.simulator.cluster import Cluster, Fault


def slow_prefill(at_ms: float, worker_ids: list[str], times: float) -> Fault:
    """Prompts take so many times longer on these workers from now on."""

    def strike(cluster: Cluster) -> None:
        for worker_id in worker_ids:
            cluster.workers[worker_id].engine.slow_prefill = times

    return Fault(at_ms, strike)


def slow_links(at_ms: float, times: float) -> Fault:
    """Transfers take so many times longer from now on."""

    def strike(cluster: Cluster) -> None:
        cluster.links.slow = times

    return Fault(at_ms, strike)


def crash(at_ms: float, worker_id: str) -> Fault:
    """A worker dies with all that it holds."""
    return Fault(at_ms, lambda cluster: cluster.workers[worker_id].crash())


def restart(at_ms: float, worker_id: str) -> Fault:
    """A dead worker comes back empty, as a new life."""

    def strike(cluster: Cluster) -> None:
        worker = cluster.workers[worker_id]
        worker.restart()
        cluster.introduce(worker)

    return Fault(at_ms, strike)
