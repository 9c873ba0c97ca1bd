"""The deployments that `bench vllm` compares: Trivium's, and vLLM's own serving on the same cores.

Every deployment has two engines of the same model with the same settings, one on each half of the
cores. vLLM's are its OpenAI API servers, without Trivium's plugin, behind a proxy that makes two
calls (`NixlConnector`) or sends whole requests to the servers in turn. A deployment that is not
under test is frozen if its engines would use CPU time while idle.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from infra.bench.stacks import HOST, running, stack_on
from infra.broker.probe import free_ports
from infra.processes.identity import children, members
from infra.processes.supervisor import ProcessSpec, SupervisedProcess, Supervisor
from infra.stack.fleet_watch import FleetWatch
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan, core_shares
from infra.stack.reassignment import move_worker
from schemas.errors import NotReady
from schemas.records import MemberKind, Role
from schemas.settings import ModelSettings
from streams.log.clients import LogProducer
from streams.log.registry import make_codec
from workers.config import WorkerSettings

MODEL = "model"
ENGINE: dict[str, Any] = {"block_size": 32, "running_max": 64, "kv_cache_bytes": 512 << 20}
MODEL_LEN_MAX = 2_048
START_S = 420.0
_POLL_S = 0.2
_WORKER = "VLLM::Worker"  # vLLM's title of the processes that compute
_PATIENT = {"first_token_timeout_ms": 120_000, "progress_timeout_ms": 120_000}


@dataclass(slots=True)
class VllmPeer:
    """One deployment under test, with its address."""

    name: str
    url: str
    freezable: Sequence[SupervisedProcess] = field(default_factory=list)  # with their groups

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the groups of all freezable processes."""
        for process in self.freezable:
            os.killpg(process.pid, number)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the frozen processes run until the block ends."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


def trivium(
    name: str, plan: StackPlan, bootstrap: str, model: Path, folder: Path
) -> AbstractAsyncContextManager[Stack]:
    """Run a Trivium stack on a running broker."""
    served = ModelSettings(path=str(model), name=MODEL, max_model_len=MODEL_LEN_MAX)
    worker = WorkerSettings(engine="vllm", drain_timeout_ms=2_000)
    settings = {**ENGINE, **_PATIENT}
    return running(stack_on(bootstrap, name, plan, folder, served, worker, settings), START_S)


async def give_roles(stack: Stack, roles: Sequence[Role]) -> None:
    """Give every worker of the stack all of these roles. Workers keep their engines."""
    log = stack.settings.log
    codec = await asyncio.to_thread(make_codec, log)
    making = LogProducer(log, codec, durable=True, client_id="b")
    async with FleetWatch(log, codec).followed() as fleet, making as producer:
        for worker_id, kind in stack.plan.names().items():
            if kind is MemberKind.WORKER:
                await move_worker(fleet, producer, log, worker_id, roles, timeout_s=60)


@asynccontextmanager
async def vllm_pair(
    name: str, title: str, model: Path, folder: Path, *, hands_over: bool
) -> AsyncIterator[VllmPeer]:
    """Run two of vLLM's API servers behind a proxy, frozen unless they are under test."""
    supervisor = Supervisor()
    ports = free_ports(*[HOST] * 5)
    servers, channels, proxy_port = ports[:2], ports[2:4], ports[4]
    try:
        for number, (port, channel) in enumerate(zip(servers, channels, strict=True)):
            spec = _server(f"{name}-{number}", number, port, channel, model, folder, hands_over)
            supervisor.start(spec)
        first, second = (f"http://{HOST}:{port}" for port in servers)
        deals = ("aiohttp", first, second) if hands_over else ("robin", "", f"{first},{second}")
        supervisor.start(_proxy(name, deals, proxy_port, folder))
        for number, port in enumerate(servers):
            process = supervisor.processes[f"{name}-{number}"]
            await _healthy(f"http://{HOST}:{port}/health", process)
        engines = [supervisor.processes[f"{name}-{number}"] for number in range(2)]
        for number, process in enumerate(engines):
            hold(process.pid, _cores(number))
        peer = VllmPeer(title, f"http://{HOST}:{proxy_port}", engines)
        peer.signal(signal.SIGSTOP)
        try:
            yield peer
        finally:
            peer.signal(signal.SIGCONT)
    finally:
        await supervisor.stop(grace_s=10)


def _server(
    name: str, number: int, port: int, channel: int, model: Path, folder: Path, hands_over: bool
) -> ProcessSpec:
    """Return an API server on its half of the cores, as Trivium's launcher would bind a worker."""
    cores = _cores(number)
    flags: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "model": model,
        "served-model-name": MODEL,
        "dtype": "float32",
        "max-model-len": MODEL_LEN_MAX,
        "block-size": ENGINE["block_size"],
        "max-num-seqs": ENGINE["running_max"],
        "kv-cache-memory-bytes": ENGINE["kv_cache_bytes"],
        "uvicorn-log-level": "warning",
    }
    if hands_over:
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        flags["kv-transfer-config"] = json.dumps(connector)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    env = {
        **os.environ,
        "VLLM_PLUGINS": "",  # without Trivium's plugin, which would repair the rival
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "TORCHDYNAMO_DISABLE": "1",  # no compilation, as in Trivium's worker
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return _spec(name, command, folder, env)


def _cores(number: int) -> Sequence[int]:
    """Return the cores of one of the two engines."""
    return core_shares(sorted(os.sched_getaffinity(0)), 2)[number]


def hold(pid: int, cores: Sequence[int]) -> None:
    """Bind the engine workers under a process to their cores again.

    vLLM's `NixlConnector` moves the computing thread to the last core of its node, regardless of
    its binding, so both engines of this machine would share one core.
    """
    for child, command in {**children(pid), **members(pid)}.items():
        if _WORKER in command:
            for thread in os.listdir(f"/proc/{child}/task"):
                with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                    os.sched_setaffinity(int(thread), cores)
        if child != pid:
            hold(child, cores)


def _proxy(name: str, deals: Sequence[str], port: int, folder: Path) -> ProcessSpec:
    kind, prefill, decode = deals
    program = ("-m", "infra.bench.serving.proxies")
    command = [sys.executable, *program, kind, str(port), prefill, decode]
    return _spec(f"{name}-proxy", command, folder, dict(os.environ))


def _spec(name: str, command: Sequence[str], folder: Path, env: dict[str, str]) -> ProcessSpec:
    log_file = folder / f"{name}.log"
    return ProcessSpec(
        name=name, command=tuple(command), log_file=log_file, env=env, restart=False, grace_s=10.0
    )


async def _healthy(url: str, process: SupervisedProcess) -> None:
    end_s = time.monotonic() + START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client:
        while True:
            try:
                async with client.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            if process.failed or time.monotonic() > end_s:
                raise NotReady(f"{process.name}: does not serve; it says:\n{process.tail()}")
            await asyncio.sleep(_POLL_S)
