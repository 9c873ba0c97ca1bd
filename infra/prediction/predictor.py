"""Predicts recorded traffic under other settings: a simulated cluster serves it again.

The router's core, the gateways' and the workers' rules are the real ones (`infra/simulator`). The
cluster has the recorded workers at their recorded speeds (`speeds.py`). Each record takes a delay
over the log that is sampled from the recorded ones. One router stands for all of them.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from infra.prediction.machine import MeasuredGpu
from infra.prediction.speeds import MeasuredSpeeds
from infra.prediction.traffic import RecordedTraffic, script
from infra.simulator.cluster import READY_MS, Cluster
from infra.simulator.machine.gpu import SimGpu
from infra.simulator.machine.latency import H100, LLAMA_8B, Link, Setup
from infra.simulator.shape import ClusterShape
from schemas.errors import RecordError
from schemas.fleet import Member
from schemas.records import Capability, Outcome, Role
from streams.agents.router import load_table
from streams.config import RouterSettings

_KINDS = {
    frozenset({Role.PREFILL}): "prefill",
    frozenset({Role.DECODE}): "decode",
    frozenset({Role.PREFILL, Role.DECODE}): "both",
    frozenset({Role.REPLICA}): "replica",
}


class _MeasuredCluster(Cluster):
    """A simulated cluster as fast as the recorded one."""

    def __init__(
        self, traffic: RecordedTraffic, speeds: MeasuredSpeeds, settings: RouterSettings
    ) -> None:
        self._speeds = speeds
        capabilities = [_capability(worker) for worker in traffic.workers]
        super().__init__(
            shape_of(traffic.workers),
            setup_of(traffic.workers, speeds),
            settings,
            timeout_ms=max(
                request.deadline_ms - request.arrived_ms for request in traffic.requests.values()
            ),
            table=load_table(settings),
            gateways=1,
            orchestrations=tuple(capabilities[0].orchestrations),
        )
        self._draw = random.Random(0)
        self.bus.drawn_ms = self._hop_ms

    def _hop_ms(self, topic: str) -> float:
        samples_ms = self._speeds.requests_ms if topic == "requests" else self._speeds.hops_ms
        return self._draw.choice(samples_ms)

    def gpu_of(self, worker_id: str) -> Callable[..., SimGpu]:
        """Return a constructor of GPUs that take the measured times."""
        return lambda *gpu_args: MeasuredGpu(self._speeds, *gpu_args)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted outcomes of the same requests, by id."""

    outcomes: dict[str, Outcome]
    unserved: int  # requests that were never sent, as the turn before did not complete


def predict(
    traffic: RecordedTraffic, speeds: MeasuredSpeeds, settings: RouterSettings
) -> Prediction:
    """Serve the recorded traffic once more; raises ConfigError for a table that cannot be read."""
    cluster = _MeasuredCluster(traffic, speeds, settings)
    block_tokens = cluster.setup.block_tokens
    conversations, names = script(traffic, begin_ms=READY_MS, block_tokens=block_tokens)
    cluster.run(conversations)
    outcomes = {
        names[served.request_id]: served.outcome
        for served in cluster.clients.requests
        if served.outcome is not None
    }
    return Prediction(outcomes, len(names) - len(outcomes))


def shape_of(workers: Sequence[Member]) -> ClusterShape:
    """Return the number of workers of each kind; raises RecordError for roles that are not
    simulated."""
    counts = Counter[str]()
    for worker in workers:
        roles = frozenset(worker.registration.roles)
        if roles not in _KINDS:
            names = ", ".join(sorted(role.value for role in roles))
            raise RecordError(f"{worker.member_id}: a worker with roles {names} is not simulated")
        counts[_KINDS[roles]] += 1
    return ClusterShape(**counts)


def setup_of(workers: Sequence[Member], speeds: MeasuredSpeeds) -> Setup:
    """Return credits, memory and links as workers reported; the first worker's capability stands
    for all."""
    capability, bytes_per_token = _capability(workers[0]), max(2, speeds.kv_bytes_per_token)
    blocks = max(worker.load.kv_blocks_total for worker in workers) or 1 << 20
    block_bytes = bytes_per_token * capability.block_size
    return Setup(
        gpu=replace(H100, memory_bytes=(blocks + 0.5) * block_bytes, memory_share=1.0),
        model=replace(
            LLAMA_8B,
            parameters=0.0,
            layers=1,
            kv_heads=1,
            head_dim=bytes_per_token // 2,
            bytes_per_value=1,
        ),
        link=Link(
            bytes_per_s=1e3 / speeds.transfer.slope if speeds.transfer.slope else 1e12,
            share=1.0,
            latency_ms=speeds.transfer.base,
        ),
        running_max=capability.running_max,
        prefill_credits=_credits(workers, Role.PREFILL) or capability.running_max,
        decode_credits=_credits(workers, Role.DECODE) or _credits(workers, Role.REPLICA),
        block_tokens=capability.block_size,
        bus_ms=median(speeds.hops_ms),
        ack_ms=speeds.ack_ms,
    )


def _capability(worker: Member) -> Capability:
    capability = worker.registration.capability
    assert capability is not None, "as `traffic.read` has it"
    return capability


def _credits(workers: Sequence[Member], role: Role) -> int:
    """Return one worker's credits, over all routers together."""
    return max(
        sum(count for (_, granted), count in worker.credits.items() if granted is role)
        for worker in workers
    )
