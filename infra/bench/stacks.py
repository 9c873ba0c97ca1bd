"""The stacks and brokers that benchmarks start, with the settings of a deployment where they can.

Ports are fixed, since killed gateways come back on theirs. Simulated answers end at `max_tokens`.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.broker.node import Broker
from infra.broker.probe import free_ports, port_is_taken
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import NotReady
from schemas.records import Priority
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.log.admin import create_topics
from workers.config import WorkerSettings
from workers.models.sim import SIM_MODEL, make_sim_model

HOST, MODEL = "127.0.0.1", SIM_MODEL
SIM: dict[str, Any] = {
    "prefill_base_ms": 20.0,
    "decode_step_ms": 20.0,  # slow enough that clients need few cores
    "end_every_tokens": 0,
}
DEADLINE_MS = 300_000  # longer than an outage of the broker
MODEL_START_S = 420.0
_PORT_TRIES = 20


def make_stack(
    plan: StackPlan, folder: Path, *, priority: Priority = Priority.STANDARD, **sim: Any
) -> Stack:
    """Return a stack of simulated engines with its own broker, not started, in a new folder.

    Calls over HTTP have the class `priority`; `sim` has changes of `SIM`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    model = make_sim_model(folder / "model")
    port = adjacent_ports(plan.gateways)
    settings = Settings(
        broker=BrokerSettings(port=0, heap_mb=384),
        model=ModelSettings(path=str(model), name=MODEL),
        gateway=GatewaySettings(port=port, deadline_ms=DEADLINE_MS, priority=priority.value),
        worker=WorkerSettings(engine="sim"),
        engines={"sim": {**SIM, **sim}},
    )
    return Stack(settings, plan, folder=folder)


def model_stack(
    plan: StackPlan,
    folder: Path,
    *,
    model: str = "",
    engine: dict[str, Any] | None = None,
    ttft_ms: int = 600_000,
    deadline_ms: int = 1_200_000,
) -> Stack:
    """Return a stack of real engines with its own broker, not started, in a new folder. Without
    `model` they serve that of `trivium up`; `engine` has changes of vLLM's settings."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = Settings(
        broker=BrokerSettings(port=0),
        gateway=GatewaySettings(port=0, ttft_ms=ttft_ms, deadline_ms=deadline_ms),
        model=ModelSettings(path=model),
        engines={"vllm": engine or {}},
    )
    return Stack(settings, plan, folder=folder)


def stack_on(
    bootstrap: str, name: str, plan: StackPlan, folder: Path, model: ModelSettings,
    worker: WorkerSettings, settings: dict[str, Any],
) -> Stack:  # fmt: skip
    """Return a stack on a running broker, with topics of its own. `settings` are the engine's."""
    (port,) = free_ports(HOST)
    return Stack(
        Settings(
            log=LogSettings(bootstrap=bootstrap, topic_prefix=f"bench-{name}."),
            model=model,
            gateway=GatewaySettings(port=port),
            worker=worker,
            engines={worker.engine: settings},
        ),
        replace(plan, broker=False),
        folder=folder / name,
    )


@asynccontextmanager
async def running(stack: Stack, start_s: float | None = None) -> AsyncIterator[Stack]:
    """Start the stack within `start_s`, and stop it when the block ends."""
    try:
        await (stack.start() if start_s is None else stack.start(timeout_s=start_s))
        yield stack
    finally:
        await stack.stop(grace_s=10)


@contextmanager
def running_broker(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a broker in this folder until the block ends, or the thread that entered it. Yields its
    bootstrap address and its process id."""
    broker = Broker(BrokerSettings(port=0), folder / "broker", tethered=True)
    bootstrap = broker.start()
    try:
        yield bootstrap, broker.status().pid
    finally:
        broker.stop()


@contextmanager
def running_log(folder: Path) -> Iterator[tuple[LogSettings, int]]:
    """Run a broker with all topics, and yield its log settings and its process id."""
    with running_broker(folder) as (bootstrap, pid):
        log = LogSettings(bootstrap=bootstrap)
        asyncio.run(create_topics(log))
        yield log, pid


def urls(stack: Stack) -> list[str]:
    """Return the URLs of all gateways, running or not."""
    first = stack.settings.gateway.port
    return [f"http://{HOST}:{first + number}" for number in range(stack.plan.gateways)]


def adjacent_ports(count: int) -> int:
    """Return the first of `count` adjacent ports that are free now; raises NotReady."""
    for _ in range(_PORT_TRIES):
        (first,) = free_ports(HOST)
        if not any(port_is_taken(HOST, first + number) for number in range(count)):
            return first
    raise NotReady(f"found no {count} free ports in a row on {HOST}")
