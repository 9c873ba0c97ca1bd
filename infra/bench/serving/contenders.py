"""Starts the servers that the serving benchmark compares.

These are the simulated engine behind plain HTTP, both proxies in front of it, and two Trivium
stacks on one broker: one with a replica worker, one with a prefill and a decode worker. All engines
have the same settings. All processes stop when the context ends.
"""

import asyncio
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.broker.node import Broker
from infra.broker.probe import free_ports
from infra.broker.section import BrokerSettings
from infra.processes.supervisor import ProcessSpec, Supervisor
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import NotReady
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from workers.config import WorkerSettings
from workers.models.sim import make_sim_model

HOST = "127.0.0.1"
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
    model = _fresh_model(folder)
    peers: dict[str, ServingPeer] = {}
    async with AsyncExitStack() as stack:
        if {DIRECT, HTTPX, AIOHTTP} & set(names):
            peers |= await stack.enter_async_context(_baselines(folder, model))
        if {REPLICA, REMOTE} & set(names):
            peers |= await stack.enter_async_context(_trivium(names, folder, model))
        yield {name: peers[name] for name in NAMES if name in names}


def _fresh_model(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return make_sim_model(folder / "model")


@asynccontextmanager
async def _baselines(folder: Path, model: Path) -> AsyncIterator[dict[str, ServingPeer]]:
    supervisor = Supervisor()
    names = (DIRECT, HTTPX, AIOHTTP)
    ports = dict(zip(names, free_ports(*[HOST] * len(names)), strict=True))
    engine_url = f"http://{HOST}:{ports[DIRECT]}"
    sim = json.dumps({**SIM, "transfer": "memory"})
    commands = {
        DIRECT: ("infra.bench.serving.sim_server", str(ports[DIRECT]), str(model), sim),
        HTTPX: ("infra.bench.serving.proxies", "httpx", str(ports[HTTPX]), engine_url, engine_url),
        AIOHTTP: (
            "infra.bench.serving.proxies",
            "aiohttp",
            str(ports[AIOHTTP]),
            engine_url,
            engine_url,
        ),
    }
    try:
        for name, command in commands.items():
            supervisor.start(
                ProcessSpec(
                    name=name,
                    command=(sys.executable, "-m", *command),
                    log_file=folder / f"{name}.log",
                    restart=False,
                    grace_s=5.0,
                )
            )
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


@asynccontextmanager
async def _trivium(
    names: tuple[str, ...], folder: Path, model: Path
) -> AsyncIterator[dict[str, ServingPeer]]:
    plans = {
        REPLICA: StackPlan(prefill=0, decode=0, replica=1),
        REMOTE: StackPlan(prefill=1, decode=1),
    }
    broker_settings = BrokerSettings(port=0)
    home = folder / "broker-home"
    broker = Broker(broker_settings, home / "broker", tethered=True)
    bootstrap = broker.start()  # a tethered broker ends with the thread that starts it
    peers: dict[str, ServingPeer] = {}
    try:
        async with AsyncExitStack() as stack:
            for name, plan in plans.items():
                if name not in names:
                    continue
                (port,) = free_ports(HOST)
                settings = _settings(name, bootstrap, port, model)
                plan = dataclasses.replace(plan, broker=False)
                peer_stack = await stack.enter_async_context(
                    Stack(settings, plan, folder=folder / name)
                )
                pids = _pids(peer_stack, broker.status().pid)
                peers[name] = ServingPeer(name=name, port=port, pids=pids, log=settings.log)
            yield peers
    finally:
        broker.stop()


def _pids(stack: Stack, broker_pid: int) -> Callable[[], dict[str, int]]:
    def pids() -> dict[str, int]:
        by_kind = {name.rpartition("-")[0]: p.pid for name, p in stack.processes.items()}
        return {**by_kind, "broker": broker_pid}

    return pids


def _settings(name: str, bootstrap: str, port: int, model: Path) -> Settings:
    return Settings(
        log=LogSettings(bootstrap=bootstrap, topic_prefix=f"bench-{name}."),
        model=ModelSettings(path=str(model), name=MODEL, max_model_len=CONTEXT_TOKENS),
        gateway=GatewaySettings(port=port),
        worker=WorkerSettings(engine="sim"),
        engines={"sim": SIM},
    )


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
