"""Whole stacks for tests: settings that start quickly and wait long, and a small client.

`audits.py` reads what a stack has written;
`tests/e2e/audits.py` has an engine to compare it with.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from infra.processes.supervisor import ProcessSpec, SupervisedProcess, Supervisor
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.records import MemberKind
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.config import RouterSettings
from streams.log.clock import wall_ms
from tests.e2e.audits import know_workers
from tests.long_leases import LONG_LEASE_MS, long_leases, process_leases
from tests.replay_check import replayed
from tests.waits import PATIENCE_S, START_S, until
from workers.config import WorkerSettings
from workers.kv.network import variables

SIM = {
    "prefill_base_ms": 5.0,
    "decode_step_ms": 2.0,
    "end_every_tokens": 0,
    "running_max": 64,
    "transfer_timeout_ms": 30_000,
    "transfer_tries_max": 10,  # a peer that is new may not have heard of this one
}
# Longer than a machine stalls; a worker drains no longer than its supervisor waits.
GATEWAY: dict[str, Any] = {"port": 0, "accept_ms": 30_000, "gap_ms": 60_000, "deadline_ms": 300_000}
DRAIN_MS = 35_000


def sim_settings(
    log: LogSettings,
    *,
    gateway: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    **sim: Any,
) -> Settings:
    """A deployment of simulated engines with real NIXL, on the test's broker and topics."""
    return Settings(
        log=log,
        model=ModelSettings(path="sim"),
        gateway=GatewaySettings(**GATEWAY | (gateway or {})),
        router=RouterSettings(**(router or {})),
        worker=WorkerSettings(engine="sim", drain_timeout_ms=DRAIN_MS),
        engines={"sim": {**SIM, **sim}},
    )


class LeaseSupervisor(Supervisor):
    """Starts processes with leases of this length; `env_by_process` adds to single ones."""

    def __init__(self, lease_ms: int, env_by_process: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self._lease_ms, self._env_by_process = lease_ms, env_by_process

    def start(self, spec: ProcessSpec) -> SupervisedProcess:
        process_env = self._env_by_process.get(spec.name, {})
        env = {**spec.env, **self.leases, **process_env}
        return super().start(replace(spec, env=env, forks=None if process_env else spec.forks))

    @property
    def leases(self) -> Mapping[str, str]:
        """Of processes without others of their own, and of who forks them."""
        return process_leases(self._lease_ms)


class PatientStack(Stack):
    """Waits for processes until they hang."""

    async def start(self, *, timeout_s: float = START_S) -> None:
        await super().start(timeout_s=timeout_s)

    async def wait_ready(self, *names: str, timeout_s: float = START_S) -> None:
        await super().wait_ready(*names, timeout_s=timeout_s)

    async def scale(self, *, model: str = "", timeout_s: float = START_S, **counts: int) -> None:
        await super().scale(model=model, timeout_s=timeout_s, **counts)


class LastingStack(PatientStack):
    """Of processes whose leases are the supervisor's."""

    def __init__(self, supervisor: LeaseSupervisor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._supervisor = self._leases = supervisor

    def _start_forks(self) -> None:
        """What imports for others imports the length of leases, too."""
        with variables(self._leases.leases):
            super()._start_forks()


def lasting_stack(
    settings: Settings,
    plan: StackPlan,
    *,
    folder: Path | None = None,
    lease_ms: int = LONG_LEASE_MS,
    env_by_process: Mapping[str, Mapping[str, str]] | None = None,
) -> Stack:
    """A stack of such processes, not started."""
    return LastingStack(
        LeaseSupervisor(lease_ms, env_by_process or {}), settings, plan, folder=folder
    )


@asynccontextmanager
async def stack(
    settings: Settings,
    folder: Path,
    *,
    seconds: float = START_S,
    lease_ms: int = LONG_LEASE_MS,
    env_by_process: Mapping[str, Mapping[str, str]] | None = None,
    replays: bool = True,
    **plan: Any,
) -> AsyncIterator[Stack]:
    """Start the plan's processes, and stop them whatever happens. What routers decided meanwhile
    is then replayed, unless `replays` is false.

    Where workers are to be lost by their silence, leases are brief ones. Those of the test's own
    process, which looks whether the others are ready, are as long.
    """
    begun_ms = wall_ms()
    counts = {"prefill": 0, "decode": 0, **plan}
    full_plan = replace(StackPlan(broker=False), **counts)
    running = lasting_stack(
        settings, full_plan, folder=folder, lease_ms=lease_ms, env_by_process=env_by_process
    )
    with long_leases(lease_ms):
        try:
            await running.start(timeout_s=seconds)
            await met(running)
            yield running
        finally:
            await running.stop(grace_s=40)  # a router may take 15 s to wind down
    if replays:
        path = folder / "recording.avro"
        await replayed(running.settings.log, path, begun_ms, lease_ms=lease_ms)


async def met(running: Stack) -> None:
    """Wait until all are ready and those that take requests know the workers."""
    names: dict[MemberKind, set[str]] = {kind: set() for kind in MemberKind}
    for name, kind in running.plan.names().items():
        names[kind].add(name)

    async def workers_known() -> bool:
        routers = names[MemberKind.ROUTER]
        other_prefixes = ("retrieval-", "embedding-", "embedder-")
        workers = {name for name in names[MemberKind.WORKER] if not name.startswith(other_prefixes)}
        return await know_workers(running.settings.log, routers, workers)

    await until(workers_known, seconds=START_S)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:

        async def served() -> bool:
            answers = [await client.get(f"{url}/health/ready") for url in running.gateway_urls]
            return {answer.status_code for answer in answers} == {200}

        await until(served, seconds=START_S)


@dataclass
class Answer:
    """What a client saw of one stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)  # tokens, characters after each
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    trivium: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False


class Client:
    """A plain SSE client of one gateway."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.http = httpx.AsyncClient(base_url=url, timeout=300)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def body(self, text: str, **fields: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 32,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    async def chat(self, text: str, **fields: Any) -> Answer:
        """One whole answer, not streamed."""
        response = await self.http.post("/v1/chat/completions", json=self.body(text, **fields))
        return self.parsed(response)

    def parsed(self, response: httpx.Response) -> Answer:
        payload = response.json()
        answer = Answer(status=response.status_code, headers=dict(response.headers))
        if "error" in payload:
            answer.error = payload["error"]
            return answer
        (choice,) = payload["choices"]
        answer.text = choice["message"]["content"]
        answer.token_ids = choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"]
        answer.usage = payload["usage"]
        return answer

    async def stream(self, text: str, *, into: Answer | None = None, **fields: Any) -> Answer:
        """One answer as a stream; `into` can be looked at while it grows."""
        answer = into if into is not None else Answer()
        options = {"include_usage": True}
        body = self.body(text, stream=True, stream_options=options, **fields)
        ids = {"X-Trivium-Event-Ids": "true"}
        async with self.http.stream(
            "POST", "/v1/chat/completions", json=body, headers=ids
        ) as response:
            await read_events(response, answer)
        return answer

    async def resume(self, request_id: str, event_id: str) -> Answer:
        """The rest of a stream after an event, from whichever gateway this client speaks to."""
        answer = Answer()
        headers = {"Last-Event-ID": event_id}
        url = f"/v1/requests/{request_id}/events"
        async with self.http.stream("GET", url, headers=headers) as response:
            await read_events(response, answer)
        return answer


def client_of(running: Stack, gateway: int = 0) -> Client:
    """Of one of a stack's gateways."""
    return Client(running.gateway_urls[gateway], running.settings.model.served_name)


async def read_events(response: httpx.Response, answer: Answer) -> None:
    """Fold server-sent events into the answer; the id of one counts when all of it is there."""
    answer.status, answer.headers = response.status_code, dict(response.headers)
    if response.status_code != 200:
        answer.error = json.loads(await response.aread())["error"]
        return
    event_id = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            answer.is_done = True
        elif line.startswith("data: "):
            fold(json.loads(line.removeprefix("data: ")), answer)
            if event_id:
                answer.event_ids.append(event_id)
                answer.marks.append((len(answer.token_ids), len(answer.text)))
                event_id = ""


def fold(event: dict[str, Any], answer: Answer) -> None:
    """One chunk."""
    answer.error = event.get("error") or answer.error
    answer.usage = event.get("usage") or answer.usage
    answer.trivium = event.get("trivium") or answer.trivium
    for choice in event.get("choices", []):
        answer.text += choice["delta"].get("content") or ""
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
