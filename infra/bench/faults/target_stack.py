"""The stack of the fault benchmarks: simulated engines, real NIXL, its own broker.

Settings are those of a deployment, except that ports are fixed and answers end at `max_tokens`.
"""

import shutil
from pathlib import Path
from typing import Any

from infra.broker.probe import free_ports, port_is_taken
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import NotReady
from schemas.records import Priority
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from workers.config import WorkerSettings
from workers.models.sim import SIM_MODEL, make_sim_model

HOST, MODEL = "127.0.0.1", SIM_MODEL
SIM: dict[str, Any] = {
    "prefill_base_ms": 20.0,
    "decode_step_ms": 20.0,  # slow enough that clients need few cores
    "end_every_tokens": 0,
}
DEADLINE_MS = 300_000  # longer than an outage of the broker
_PORT_TRIES = 20


def make_stack(
    plan: StackPlan, folder: Path, *, priority: Priority = Priority.STANDARD, **sim: Any
) -> Stack:
    """Return a stack, not started, in a new folder. Calls over HTTP have the class `priority`."""
    shutil.rmtree(folder, ignore_errors=True)
    model = make_sim_model(folder / "model")
    settings = Settings(
        log=LogSettings(),
        broker=BrokerSettings(port=0, heap_mb=384),
        model=ModelSettings(path=str(model), name=MODEL),
        gateway=GatewaySettings(
            port=adjacent_ports(plan.gateways), deadline_ms=DEADLINE_MS, priority=priority.value
        ),
        worker=WorkerSettings(engine="sim"),
        engines={"sim": {**SIM, **sim}},
    )
    return Stack(settings, plan, folder=folder)


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
