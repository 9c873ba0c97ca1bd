"""Workers and routers that sleep, are not heard, or have a wrong clock: simulated, they keep the
rules of their leases."""

from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.faults import members
from infra.simulator.log.clock import Clock, ProcessClock, WallClock
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from schemas.fleet import LEASE_MS
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all

PROFILE = Profile(
    first=TurnShape(input_tokens=1_000, output_tokens=300),
    later=TurnShape(input_tokens=200, output_tokens=100),
)
STRIKE_MS = READY_MS + 1_000.0


def serve(strike: SimFault) -> Cluster:
    """Serve conversations on two decode workers, under one fault."""
    cluster = Cluster(
        ClusterShape(prefill=1, decode=2),
        Setup(ack_ms=2.0, steps_max=4),
        RouterSettings(policy="static"),
        gateways=2,
        keeps_log=True,
        checkers=[OneOutcome()],
        faults=[strike],
    )
    serve_all(cluster, PROFILE, per_s=5.0, duration_ms=2_000.0, seed=1)
    assert all(request.completed for request in cluster.clients.requests)
    return cluster


def attempts(cluster: Cluster) -> int:
    """Return the highest number of attempts of any request."""
    return max(request.outcome.attempt for request in cluster.clients.requests if request.outcome)


def test_worker_paused_within_lease_continues() -> None:
    cluster = serve(
        SimFault(STRIKE_MS, lambda c: members.pause_worker(c, c.workers["decode-0"], 1_500.0))
    )
    assert cluster.workers["decode-0"].epoch == 1 and attempts(cluster) == 1


def test_worker_paused_beyond_lease_restarts() -> None:
    cluster = serve(
        SimFault(STRIKE_MS, lambda c: members.pause_worker(c, c.workers["decode-0"], 4_000.0))
    )
    assert cluster.workers["decode-0"].epoch == 2 and attempts(cluster) == 2


def test_worker_without_heartbeats_stops_at_end_of_lease() -> None:
    states: list[bool] = []

    def mute(cluster: Cluster) -> None:
        worker = cluster.workers["decode-0"]
        members.mute_worker(cluster, worker, 4_000.0)
        for after_ms in (LEASE_MS - 500.0 - 1.0, LEASE_MS + 1.0):
            cluster.clock.after(after_ms, lambda: states.append(worker.clock.is_asleep))

    cluster = serve(SimFault(STRIKE_MS, mute))
    assert states == [False, True]
    assert cluster.workers["decode-0"].epoch == 2


def test_router_paused_beyond_lease_is_replaced() -> None:
    assert serve(SimFault(STRIKE_MS, lambda c: members.pause_router(c, 1_000.0))).router.epoch == 1
    assert serve(SimFault(STRIKE_MS, lambda c: members.pause_router(c, 4_000.0))).router.epoch == 2


def test_members_rejoin_after_broker_loss() -> None:
    cluster = serve(SimFault(STRIKE_MS, lambda c: members.lose_broker(c, 4_000.0)))
    assert cluster.router.epoch == 2
    assert {worker.epoch for worker in cluster.workers.values()} == {2}


def test_process_clock_defers_alarms_while_asleep() -> None:
    true, calls = Clock(), list[str]()
    process = ProcessClock(true)
    wall = WallClock(process)
    wall.ahead_ms = 100.0
    wall.at(150.0, lambda: calls.append("at 50"))
    dropped = process.at(60.0, lambda: calls.append("never"))
    process.sleep()
    while true.step():
        pass
    assert process.defers(lambda: calls.append("told")) and calls == []
    dropped.cancel()
    process.wake()
    assert calls == ["at 50", "told"] and wall.now_ms == 160.0
