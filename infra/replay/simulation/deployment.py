"""Defines a deployment to simulate: a recorded one at its measured speeds, or published hardware.

A recorded deployment has the workers of the recording, with their ids, credits and memory.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from infra.planning.hardware import gpu_named, model_named
from infra.replay.simulation.speeds import MeasuredSpeeds, measure_speeds
from infra.replay.simulation.traffic import RecordedTraffic
from infra.simulator.machine.latency import H100, LLAMA_8B, Link, Setup
from infra.simulator.shape import ClusterShape
from schemas.errors import ConfigError
from schemas.fleet import Member
from schemas.records import Capability, Orchestration, Role
from streams.config import RouterSettings
from workers.llm.vllm.settings import VllmSettings

LLM_ROLES = (Role.PREFILL, Role.DECODE, Role.REPLICA)
_KINDS: dict[tuple[Role, ...], str] = {(role,): role.value for role in LLM_ROLES}
_TIMEOUT_MS = 120_000  # of requests whose deadlines are unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedShape(ClusterShape):
    """A cluster shape with the workers' recorded ids."""

    roles_by_name: tuple[tuple[str, tuple[Role, ...]], ...]

    def roles(self) -> list[tuple[str, tuple[Role, ...]]]:
        """Return the worker ids with their roles."""
        return list(self.roles_by_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeployment:
    """A cluster to simulate; without measured speeds, its engines have those of `setup`."""

    shape: ClusterShape
    setup: Setup
    settings: RouterSettings
    speeds: MeasuredSpeeds | None = None
    orchestrations: tuple[Orchestration, ...] = ()
    timeout_ms: int = _TIMEOUT_MS


def recorded_deployment(traffic: RecordedTraffic) -> SimulatedDeployment:
    """Return the deployment of a recording, with workers as fast as they were."""
    speeds = measure_speeds(traffic)
    requests = traffic.requests.values()
    return SimulatedDeployment(
        shape=shape_of(traffic.workers),
        setup=setup_of(traffic.workers, speeds),
        settings=replace(traffic.settings, table=""),  # the file may not be here
        speeds=speeds,
        orchestrations=_common_orchestrations(traffic.workers),
        timeout_ms=max(request.deadline_ms - request.arrived_ms for request in requests),
    )


def on_hardware(
    deployment: SimulatedDeployment | None, gpu: str, model: str
) -> SimulatedDeployment:
    """Return the deployment on a published GPU and model, by their names.

    Without a deployment, it has no workers yet. Raises ConfigError for an unknown name.
    """
    setup = Setup(gpu=gpu_named(gpu or "h100"), model=model_named(model or "llama-8b"), ack_ms=2.0)
    if deployment is not None:
        return replace(deployment, setup=setup, speeds=None)
    orchestrations = VllmSettings().orchestrations
    return SimulatedDeployment(
        shape=ClusterShape(), setup=setup, settings=RouterSettings(), orchestrations=orchestrations
    )


def with_pools(deployment: SimulatedDeployment, pools: str) -> SimulatedDeployment:
    """Return the deployment with other workers, such as 2P2D; raises ConfigError."""
    shape = ClusterShape.parse(pools)
    if not pools or shape.name != pools:
        raise ConfigError(f"--pools: expected workers such as 2P2D, 1P1D2R or 4R, found {pools!r}")
    return replace(deployment, shape=shape)


def shape_of(workers: Sequence[Member]) -> RecordedShape:
    """Return the recorded workers, in order of their ids."""
    roles_by_name = {worker.member_id: _roles(worker) for worker in workers}
    counts = Counter(_KINDS.get(roles, "both") for roles in roles_by_name.values())
    return RecordedShape(roles_by_name=tuple(sorted(roles_by_name.items())), **counts)


def _roles(worker: Member) -> tuple[Role, ...]:
    return tuple(role for role in LLM_ROLES if role in worker.registration.roles)


def _common_orchestrations(workers: Iterable[Member]) -> tuple[Orchestration, ...]:
    """Return the orchestrations that all workers support which hand KV over."""
    lists = [orders for worker in workers if (orders := _capability(worker).orchestrations)]
    first, *rest = lists or [()]
    return tuple(order for order in first if all(order in orders for orders in rest))


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
