"""Starts the servers that the serving benchmark compares.

These are the simulated engine behind plain HTTP, both proxies in front of it, and two Trivium
stacks on one broker: one with a replica worker, one with a prefill and a decode worker. All engines
have the same settings. All processes stop when the context ends.
"""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.bench.stacks import HOST, running_broker, stack_on
from infra.broker.probe import free_ports
from infra.processes.supervisor import ProcessSpec, Supervisor
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import NotReady
from schemas.settings import LogSettings, ModelSettings
from workers.config import WorkerSettings
from workers.models.sim import make_sim_model

MODEL = "sim"
DIRECT, HTTPX, AIOHTTP, REPLICA, REMOTE = "direct", "httpx", "aiohttp", "replica", "remote"
NAMES = (DIRECT, HTTPX, AIOHTTP, REPLICA, REMOTE)
SIM: dict[str, Any] = {
    "prefill_base_ms": 20.0,
    "decode_step_ms": 5.0,
    "running_max": 2_048,
    "prefill_running_max": 2_048,
    "waiting_max": 4_096,
    "kv_blocks": 32_768,
    "end_every_tokens": 0,
}
PLANS = {
    REPLICA: StackPlan(prefill=0, decode=0, replica=1),
    REMOTE: StackPlan(prefill=1, decode=1),
}
_START_TIMEOUT_S = 120.0
CONTEXT_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPeer:
    """A server under test. `pids` returns its processes by name, including the broker."""

    name: str
    port: int
    pids: Callable[[], dict[str, int]]
    log: LogSettings | None = None  # of a Trivium stack


@asynccontextmanager
async def running_peers(
    names: tuple[str, ...], folder: Path
) -> AsyncIterator[dict[str, ServingPeer]]:
    """Start these peers and yield them by name. Recreates `folder`, an absolute path."""
    shutil.rmtree(folder, ignore_errors=True)
    model = make_sim_model(folder / "model")
    peers: dict[str, ServingPeer] = {}
    async with AsyncExitStack() as stack:
        if {DIRECT, HTTPX, AIOHTTP} & set(names):
            peers |= await stack.enter_async_context(_baselines(folder, model))
        if {REPLICA, REMOTE} & set(names):
            bootstrap, broker_pid = stack.enter_context(running_broker(folder / "broker-home"))
            served = ModelSettings(path=str(model), name=MODEL, max_model_len=CONTEXT_TOKENS)
            worker = WorkerSettings(engine="sim")
            for name, plan in PLANS.items():
                if name in names:
                    ours = stack_on(bootstrap, name, plan, folder, served, worker, SIM)
                    peers[name] = _peer(name, await stack.enter_async_context(ours), broker_pid)
        yield {name: peers[name] for name in NAMES if name in names}


def _peer(name: str, stack: Stack, broker_pid: int) -> ServingPeer:
    def pids() -> dict[str, int]:
        by_kind = {name.rpartition("-")[0]: p.pid for name, p in stack.processes.items()}
        return {**by_kind, "broker": broker_pid}

    settings = stack.settings
    return ServingPeer(name=name, port=settings.gateway.port, pids=pids, log=settings.log)


@asynccontextmanager
async def _baselines(folder: Path, model: Path) -> AsyncIterator[dict[str, ServingPeer]]:
    supervisor = Supervisor()
    names = (DIRECT, HTTPX, AIOHTTP)
    ports = dict(zip(names, free_ports(*[HOST] * len(names)), strict=True))
    engine_url = f"http://{HOST}:{ports[DIRECT]}"
    sim = json.dumps({**SIM, "transfer": "memory"})
    proxy = "infra.bench.serving.proxies"
    commands = {
        DIRECT: ("infra.bench.serving.sim_server", str(ports[DIRECT]), str(model), sim),
        HTTPX: (proxy, "httpx", str(ports[HTTPX]), engine_url, engine_url),
        AIOHTTP: (proxy, "aiohttp", str(ports[AIOHTTP]), engine_url, engine_url),
    }
    try:
        for name, command in commands.items():
            arguments, log = (sys.executable, "-m", *command), folder / f"{name}.log"
            spec = ProcessSpec(
                name=name, command=arguments, log_file=log, restart=False, grace_s=5.0
            )
            supervisor.start(spec)
        for name, port in ports.items():
            await _wait_listening(name, port, folder / f"{name}.log")

        def pids_of(name: str) -> Callable[[], dict[str, int]]:
            owners = {"engine": DIRECT} if name == DIRECT else {"proxy": name, "engine": DIRECT}
            return lambda: {k: supervisor.processes[v].pid for k, v in owners.items()}

        yield {
            name: ServingPeer(name=name, port=port, pids=pids_of(name))
            for name, port in ports.items()
        }
    finally:
        await supervisor.stop()


async def _wait_listening(name: str, port: int, log_file: Path) -> None:
    end_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except OSError as error:
            if time.monotonic() > end_s:
                raise NotReady(f"{name}: does not listen; see {log_file}") from error
            await asyncio.sleep(0.05)
        else:
            writer.close()
            await writer.wait_closed()
            return
