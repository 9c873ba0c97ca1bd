"""Live stacks of this machine: their deployments, and the router settings that a run varies.

`trivium plan ppd --engine` measures a table on such a stack; evaluations compare variants on them.
"""

import asyncio
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.broker.node import Broker
from infra.broker.section import BrokerSettings
from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.records import MemberKind
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from workers.config import WorkerSettings
from workers.models.sim import make_sim_model

_RESTART_S, _POLL_S = 60.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingVariant:
    """Router settings that decide how turns are placed."""

    name: str
    policy: str = "static"
    local_share: float = 0.0
    orchestration: str = "prefill_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Workers that some variants can use; `engine` has fields of the engine's section."""

    name: str
    variants: Sequence[RoutingVariant]
    engine: dict[str, Any] = field(default_factory=dict)


LOCAL, LEARNED = (
    RoutingVariant(name="x=1", local_share=1.0),
    RoutingVariant(name="learned", policy="learned"),
)
SIM = Deployment(
    name="sim",
    engine={"decode_step_ms": 4.0, "prefill_base_ms": 10.0, "end_every_tokens": 0},
    variants=(
        RoutingVariant(name="x=0"),
        RoutingVariant(name="x=0 decode first", orchestration="decode_first"),
        RoutingVariant(name="x=0 concurrent", orchestration="concurrent"),
        LOCAL,
        replace(LEARNED, orchestration="auto"),
    ),
)
PULL = Deployment(
    name="pull",
    engine={"kv_transfer": "pull"},
    variants=(RoutingVariant(name="x=0"), LOCAL, LEARNED),
)
PUSH = Deployment(
    name="push",
    engine={"kv_transfer": "push"},
    variants=(
        RoutingVariant(name="x=0 push"),
        RoutingVariant(name="x=0 decode first", orchestration="decode_first"),
        RoutingVariant(name="x=0 concurrent", orchestration="concurrent"),
    ),
)
KEPT = Deployment(
    name="kept",
    engine={"kv_transfer": "pull", "keep_decoded_kv_ms": 60_000},
    variants=(RoutingVariant(name="x=0 reading back"),),
)
DEPLOYMENTS = {"sim": (SIM,), "vllm": (PULL, PUSH, KEPT)}


async def switch(stack: Stack, variant: RoutingVariant) -> None:
    """Restart the routers with the settings of another variant."""
    router = replace(
        stack.settings.router,
        policy=variant.policy,
        local_share=variant.local_share,
        orchestration=variant.orchestration,
    )
    stack.settings = replace(stack.settings, router=router)
    (stack.folder / "stack.toml").write_text(configuration.dump(stack.settings))
    kinds = stack.plan.names()
    before = {
        name: process.pid
        for name, process in stack.processes.items()
        if kinds[name] is MemberKind.ROUTER
    }
    for name in before:
        await stack.kill(name, signal.SIGTERM)
    async with asyncio.timeout(_RESTART_S):
        # The supervisor has no event for a restarted process.
        while any(stack.processes[name].pid in (0, pid) for name, pid in before.items()):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    await stack.wait_ready(*before)


def settings(engine: str, deployment: Deployment, log: LogSettings, model: str) -> Settings:
    """Return the settings of one deployment on this machine."""
    return Settings(
        log=log,
        model=ModelSettings(path=model, max_model_len=2_048),
        gateway=GatewaySettings(port=0),
        worker=WorkerSettings(engine=engine, drain_timeout_ms=2_000),
        engines={engine: deployment.engine},
    )


@contextmanager
def machine(engine: str, folder: Path) -> Iterator[Callable[[Deployment, StackPlan], Stack]]:
    """Start a broker and make a model for the stacks of deployments; yield a function that makes a
    stack."""
    shutil.rmtree(folder, ignore_errors=True)
    model = str(make_sim_model(folder / "model")) if engine == "sim" else "tiny"
    broker = Broker(BrokerSettings(port=0), folder / "broker", tethered=True)
    bootstrap = broker.start()  # in this thread: a tethered broker ends with its thread

    def build(deployment: Deployment, plan: StackPlan) -> Stack:
        log = LogSettings(bootstrap=bootstrap, topic_prefix=f"live-{deployment.name}.")
        stack_settings = settings(engine, deployment, log, model)
        return Stack(stack_settings, plan, folder=folder / deployment.name)

    try:
        yield build
    finally:
        broker.stop()
