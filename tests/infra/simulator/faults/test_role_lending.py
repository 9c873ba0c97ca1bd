"""A simulated fleet loses its only decode worker: a prefill worker takes over, until it is back."""

from infra.simulator.checkers.credits import Credits, Idle
from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.machine.latency import Setup
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from schemas.records import Role
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all

TURN = TurnShape(input_tokens=500, output_tokens=100)
AWAY_MS = 20_000.0


def test_prefill_worker_decodes_while_decode_worker_is_away() -> None:
    roles: list[tuple[Role, ...]] = []

    def die(cluster: Cluster) -> None:
        cluster.workers["decode-0"].crash()

    def come_back(cluster: Cluster) -> None:
        roles.append(cluster.workers["prefill-0"].roles)
        cluster.workers["decode-0"].restart()
        cluster.members.join(cluster.workers["decode-0"])

    cluster = Cluster(
        ClusterShape(prefill=1, decode=1),
        Setup(ack_ms=2.0, steps_max=4),
        RouterSettings(),
        checkers=[OneOutcome(), Credits(), Idle()],
        faults=[SimFault(READY_MS + 1_000.0, die), SimFault(READY_MS + AWAY_MS, come_back)],
    )
    serve_all(cluster, Profile(first=TURN, later=TURN), per_s=2.0, duration_ms=30_000.0, seed=1)
    served = cluster.clients.requests
    assert all(request.completed for request in served)
    waited_ms = max(request.ttft_ms for request in served)
    assert waited_ms < AWAY_MS / 2
    cluster.pass_ms(10_000.0)
    assert roles == [(Role.PREFILL, Role.DECODE)]
    assert cluster.workers["prefill-0"].roles == (Role.PREFILL,)
