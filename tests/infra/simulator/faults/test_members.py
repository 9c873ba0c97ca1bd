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
    """Conversations on two decode workers, of which one or the router is struck."""
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
    assert all(each.completed for each in cluster.clients.requests)
    return cluster


def attempts(cluster: Cluster) -> int:
    """The most that any request took."""
    return max(each.outcome.attempt for each in cluster.clients.requests if each.outcome)


def test_a_worker_that_sleeps_within_its_lease_goes_on() -> None:
    cluster = serve(
        SimFault(STRIKE_MS, lambda c: members.pause_worker(c, c.workers["decode-0"], 1_500.0))
    )
    assert cluster.workers["decode-0"].epoch == 1 and attempts(cluster) == 1


def test_a_worker_that_sleeps_longer_begins_another_life() -> None:
    cluster = serve(
        SimFault(STRIKE_MS, lambda c: members.pause_worker(c, c.workers["decode-0"], 4_000.0))
    )
    assert cluster.workers["decode-0"].epoch == 2 and attempts(cluster) == 2


def test_a_worker_whose_heartbeats_are_lost_falls_silent_at_the_end_of_its_lease() -> None:
    states: list[bool] = []

    def mute(cluster: Cluster) -> None:
        worker = cluster.workers["decode-0"]
        members.mute_worker(cluster, worker, 4_000.0)
        for after_ms in (LEASE_MS - 500.0 - 1.0, LEASE_MS + 1.0):
            cluster.clock.after(after_ms, lambda: states.append(worker.clock.is_asleep))

    cluster = serve(SimFault(STRIKE_MS, mute))
    assert states == [False, True]
    assert cluster.workers["decode-0"].epoch == 2


def test_a_router_that_sleeps_is_replaced_after_a_lease_and_says_nothing_when_it_wakes() -> None:
    assert serve(SimFault(STRIKE_MS, lambda c: members.pause_router(c, 1_000.0))).router.epoch == 1
    assert serve(SimFault(STRIKE_MS, lambda c: members.pause_router(c, 4_000.0))).router.epoch == 2


def test_while_the_broker_is_away_nothing_is_read_and_everybody_joins_again() -> None:
    cluster = serve(SimFault(STRIKE_MS, lambda c: members.lose_broker(c, 4_000.0)))
    assert cluster.router.epoch == 2
    assert {worker.epoch for worker in cluster.workers.values()} == {2}


def test_what_sleeps_does_all_of_it_later_and_nothing_that_was_cancelled() -> None:
    true, done = Clock(), list[str]()
    process = ProcessClock(true)
    wall = WallClock(process)
    wall.ahead_ms = 100.0
    wall.at(150.0, lambda: done.append("at 50"))
    dropped = process.at(60.0, lambda: done.append("never"))
    process.sleep()
    while true.step():
        pass
    assert process.defers(lambda: done.append("told")) and done == []
    dropped.cancel()
    process.wake()
    assert done == ["at 50", "told"] and wall.now_ms == 160.0
