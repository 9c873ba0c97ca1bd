"""Runs one deployment on this machine: broker, topics, routers, workers and gateways.

`trivium up`, the demo, the tests and the benchmarks use `async with Stack(settings, plan) as
stack`. The supervisor restarts processes that die; the fleet topic shows when a process is ready. A
lock allows one stack per state folder, for as long as the stack runs.
"""

import asyncio
import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from infra.broker.keeper import BrokerKeeper
from infra.broker.node import Broker
from infra.processes.fork_server import ForkServer
from infra.processes.supervisor import SupervisedProcess, Supervisor
from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.fleet_watch import FleetWatch
from infra.stack.forking import fork_servers
from infra.stack.models.orders import LoadModel, take_orders
from infra.stack.models.tables import check_names, with_names
from infra.stack.plan import (
    StackPlan,
    assign_seats,
    check_policies,
    process_specs,
    with_model,
    with_roles,
)
from infra.stack.readiness import is_served
from infra.stack.statefile import NO_BROKER, ProcessRow, StackFiles, StackState
from schemas.errors import ConfigError, NotReady, TriviumError
from schemas.fleet import FleetView
from schemas.model.adapters import resolve_adapters
from schemas.records import MemberKind, MemberState, Role
from schemas.state_folder import home
from streams.gateway.http.listener import listen
from streams.log.admin import create_topics
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms
from streams.log.registry import make_codec
from streams.log.retry import retry_until
from workers.models.folder import resolve_model

log = logging.getLogger("trivium.stack")
READY_TIMEOUT_S = 240.0
_USUAL_S = {"vllm": 25.0, "sim": 8.0}  # seconds by engine, on two otherwise idle cores
_POLL_S = 0.1
_WRITE_S = 0.25


class Stack:
    """Broker and processes of one plan. Start and stop it from the main thread's event loop."""

    def __init__(self, settings: Settings, plan: StackPlan, *, folder: Path | None = None) -> None:
        self.settings = settings.with_models(with_names(settings.models, settings.worker.engine))
        self.plan = _with_all_models(plan, self.settings)
        check_policies(self.plan, self.settings)
        self.folder = (folder or home()).absolute()
        self.ready = False
        self.waits_for = ""  # what delays the start of all processes, or of some
        self._began_s, self._start_s = time.monotonic(), 0.0
        self._supervisor = Supervisor()
        self._broker: BrokerKeeper | None = None
        self._fleet: FleetWatch | None = None
        self.forks: dict[str, ForkServer] = {}  # by the first part of names
        self._tasks: list[asyncio.Task[None]] = []
        self._files = StackFiles(self.folder)
        self._seats: dict[str, int] = {}  # of workers, among those that share the cores
        self._reloading: dict[str, int] = {}  # by worker, the process that makes room for a model
        self._orders: dict[str, asyncio.Task[None]] = {}  # by worker, the last one
        # Of gateways: while one restarts, connections wait in its socket.
        self._listeners: dict[str, socket.socket] = {}

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(grace_s=5)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def bootstrap(self) -> str:
        return self.settings.log.bootstrap

    @property
    def age_s(self) -> float:
        """Return the seconds since the start of the stack began."""
        return time.monotonic() - self._began_s

    @property
    def usual_s(self) -> float:
        """Return how long a start took here last, in seconds, or takes on two cores."""
        engine = self.settings.worker.engine if self.plan.engine_names() else ""
        return self._files.usual_s(self._kind) or _USUAL_S.get(engine, _USUAL_S["sim"])

    @property
    def _kind(self) -> str:
        return f"{self.settings.worker.engine}: {' '.join(self.plan.names())}"

    @property
    def processes(self) -> dict[str, SupervisedProcess]:
        return self._supervisor.processes

    @property
    def fleet(self) -> FleetWatch | None:
        """Return the watch that follows the fleet topic, or None before the start."""
        return self._fleet

    @property
    def gateway_urls(self) -> list[str]:
        """Return the known addresses of the gateways, as `http://host:port`."""
        return [row.url for row in self.rows() if row.kind == MemberKind.GATEWAY and row.url]

    async def start(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start everything and wait until it is ready; raises a TriviumError if that fails.

        The broker has `timeout_s` to start and to answer; the processes then have as long again.
        """
        await self.begin(timeout_s=timeout_s)
        await self.wait_ready(timeout_s=timeout_s)

    async def begin(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start everything as `start` does, but do not wait until the processes are ready."""
        self._began_s = time.monotonic()
        self._files.lock()
        for _order in take_orders(self.folder):
            pass  # of a stack that has ended
        self._listen()  # at once: a port that is taken is reported before anything starts
        self._spawn(self._write_state())
        await self._resolve_models()  # their parsers decide what fork servers import
        self._start_forks()  # before the broker: their imports take longest
        end_s = time.monotonic() + timeout_s
        await self._start_broker()
        await self._retry_until(lambda: create_topics(self.settings.log), end_s)
        codec = await asyncio.to_thread(make_codec, self.settings.log)
        self._fleet = FleetWatch(self.settings.log, codec)
        await self._retry_until(self._fleet.start, end_s)
        self._spawn(self._fleet.follow(self._keep_roles))
        self._config.write_text(configuration.dump(self.settings))
        await self._start_all(timeout_s)

    def _listen(self) -> None:
        """Open a socket for each gateway of the plan, except for gateways that are draining."""
        gateway = self.settings.gateway
        for name in self.plan.gateway_names():
            if name not in self._listeners and name not in self.processes:
                number = int(name.rpartition("-")[2])
                port = gateway.port + number if gateway.port else 0
                self._listeners[name] = listen(gateway.host, port)

    def _stop_listening(self, *, but: Collection[str] = ()) -> None:
        """Close the sockets, to refuse connections that no gateway would accept later."""
        for name in self._listeners.keys() - set(but):
            self._listeners.pop(name).close()

    def _start_forks(self) -> None:
        self.forks = fork_servers(self.plan, self.settings, self.folder)
        for server in {*self.forks.values()}:
            server.start()

    async def _start_all(self, timeout_s: float) -> None:
        """Start each process as soon as its fork server is ready, or has failed to start."""
        importing = [*dict.fromkeys(self.forks.values())]
        while importing:
            self._start_missing(but=importing)
            server = importing.pop(0)
            self.waits_for = f"{server.title} is imported, once for all processes"
            if not await server.wait_ready(timeout_s):
                server.stop()
                self.forks = {name: fork for name, fork in self.forks.items() if fork is not server}
        self.waits_for = ""
        self._start_missing()

    async def _retry_until(self, ask: Callable[[], Awaitable[object]], end_s: float) -> None:
        """Retry until `end_s`: a cluster may start after its deployment, and a new broker may be
        slow on a busy machine.
        """

        def report(trouble: str) -> None:
            self.waits_for = trouble

        await retry_until(ask, report, end_s - time.monotonic())

    async def scale(
        self, *, model: str = "", timeout_s: float = READY_TIMEOUT_S, **counts: int
    ) -> None:
        """Change counts of the plan: drain the last workers of a pool, or start more.

        `await stack.scale(prefill=3, decode=1)` returns when old ones are gone and new ones ready.
        Where there are several models, the counts are those of one, by default the first.
        """
        model = model or self.settings.model.served_name
        target = self.plan.with_counts(model, counts).names()
        self._stop_listening(but=target)
        await self._supervisor.remove([name for name in self.plan.names() if name not in target])
        # Other calls may have changed the plan meanwhile.
        self.plan = self.plan.with_counts(model, counts)
        if started := self._start_missing():
            await self.wait_ready(*started, timeout_s=timeout_s)

    def add_worker(self, role: Role, model: str = "") -> str:
        """Start one more worker of a model and return its name, without waiting for it."""
        its_model = model if self.settings.other_models else ""
        self.plan, name = self.plan.with_worker(role.value, its_model)
        self._start_missing()
        return name

    async def drain_worker(self, name: str) -> None:
        """Drain a worker and remove it from the plan; returns when its process is gone."""
        await self._supervisor.remove([name])
        self.plan = self.plan.without(name)

    async def load_model(
        self,
        worker: str,
        model: str,
        *,
        role: Role | None = None,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """Drain a worker and start it with another model, which it keeps; returns when it is ready.

        Raises ConfigError for a worker or a model that is not of this stack, NotReady after
        `timeout_s`.
        """
        self.settings.for_model(model)
        process = self.processes.get(worker)
        if worker not in self.plan.models or process is None or process.stopping:
            workers = ", ".join(self.plan.models) or "none, because there is one model"
            raise ConfigError(f"worker: expected one of {workers}, found {worker!r}")
        self.plan = self.plan.with_model(worker, model)
        process.spec = with_roles(with_model(process.spec, model), [role] if role else [])
        pid = process.pid
        if self._reloading.get(worker) != pid:  # a second signal would end it at once
            self._reloading[worker] = pid
            process.kill(signal.SIGTERM)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while pid and process.pid == pid:
                    process.changed.clear()
                    await process.changed.wait()
        except TimeoutError:
            raise NotReady(f"{worker} still drains after {timeout_s:g} s") from None
        await self.wait_ready(worker, timeout_s=timeout_s - (time.monotonic() - began_s))

    @property
    def _config(self) -> Path:
        return self.folder / "stack.toml"

    def _start_missing(self, *, but: Collection[ForkServer] = ()) -> list[str]:
        self._listen()
        specs = process_specs(
            self.plan,
            folder=self.folder,
            config=self._config,
            engine=self.settings.worker.engine,
            gateway_port=self.settings.gateway.port,
            secrets=configuration.secrets_environ(self.settings),
            used_seats=self._seats,
            forks=self.forks,
            listeners=self._listeners,
        )
        self._seats = assign_seats(self.plan.engine_names(), self._seats)
        missing = [
            spec for spec in specs if spec.name not in self.processes and spec.forks not in but
        ]
        for spec in missing:
            self._supervisor.start(spec)
        return [spec.name for spec in missing]

    async def wait_ready(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until these processes, or all, are ready, restarted ones with their new process."""
        chosen = names or tuple(self.processes)
        try:
            async with asyncio.timeout(timeout_s):
                while any(self.state_of(name) != "ready" for name in chosen):
                    self._raise_failed()  # readiness also ends by time alone: no event to wait for
                    await asyncio.sleep(_POLL_S)
                await self._until_served()
            if not self._start_s:
                self._start_s = self.age_s
                self._files.record_start(self._kind, self._start_s)
            self.ready |= not names
        except TimeoutError:
            late = [name for name in chosen if self.state_of(name) != "ready"]
            late = late or self.plan.gateway_names()  # no gateway would accept a call
            raise NotReady(
                f"not ready after {timeout_s:g} s: {', '.join(late)}; logs are in "
                f"{self.folder / 'logs'}. {late[0]} ends with:\n{self.processes[late[0]].tail()}"
            ) from None

    async def _until_served(self) -> None:
        """Wait until every gateway accepts calls: each reads the fleet topic at its own pace."""
        while self.plan.serves and not all([await is_served(url) for url in self.gateway_urls]):
            self._raise_failed()
            await asyncio.sleep(_POLL_S)

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process, as a test or a chaos schedule does; the supervisor restarts it."""
        self.processes[name].kill(number)
        await asyncio.sleep(0)

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Drain gateways, then workers and routers; then stop the broker if this stack owns it."""
        self.ready = False
        self._stop_listening()
        kinds = self.plan.names()
        gateways = [name for name in self.processes if kinds[name] is MemberKind.GATEWAY]
        await self._supervisor.stop(gateways, grace_s=grace_s)
        await self._supervisor.stop(grace_s=grace_s)
        async with AsyncExitStack() as closing:  # run every step, even when this task is cancelled
            closing.callback(self._files.release)
            for server in {*self.forks.values()}:
                closing.callback(server.stop)
            if self._broker is not None:
                closing.callback(self._broker.stop)
            if self._fleet is not None:
                closing.push_async_callback(self._fleet.stop)
            await cancel_and_wait(*self._tasks, *self._orders.values())
        self._tasks.clear()

    def state_of(self, name: str) -> str:
        """Return the state of a process, from the supervisor or from its heartbeats."""
        process = self.processes.get(name)
        if process is None:
            return "waiting"
        if process.failed:
            return "failed"
        if process.stopping:
            return "draining" if process.pid else "stopped"
        if not process.pid:
            return "restarting"
        now_ms = wall_ms()
        member = self._fleet.view.members.get(name) if self._fleet else None
        if member is None or member.registration.pid != process.pid or not member.is_alive(now_ms):
            silent = self.ready and self._fleet is not None and self._fleet.is_silent(now_ms)
            return NO_BROKER if silent else "starting"
        process.has_served |= member.state is MemberState.READY
        return "starting" if member.state is MemberState.GONE else member.condition

    def _keep_roles(self, view: FleetView) -> None:
        """Keep the present roles of moved workers, for when they are restarted."""
        for name, process in self.processes.items():
            member = view.members.get(name)
            if self._reloading.get(name) == process.pid:
                continue  # it leaves, and its next process may have another role
            if member is not None and member.registration.pid == process.pid:
                process.spec = with_roles(process.spec, member.registration.roles)

    def rows(self) -> list[ProcessRow]:
        """Return a row for every process of the plan, for display."""
        members = self._fleet.view.members if self._fleet else {}
        rows = []
        for name, kind in self.plan.names().items():
            process, member = self.processes.get(name), members.get(name)
            rows.append(
                ProcessRow(
                    name=name,
                    kind=kind.value,
                    model=self.plan.models.get(name, ""),
                    pid=process.pid if process else 0,
                    state=self.state_of(name),
                    restarts=process.restarts if process else 0,
                    url=member.registration.url if member else "",
                    log_file=str(process.spec.log_file) if process else "",
                )
            )
        return rows

    def _raise_failed(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        for process in self.processes.values():
            if process.failed:
                raise ConfigError(
                    f"{process.name} ended with code {process.exit_code}; "
                    f"{process.spec.log_file} ends with:\n{process.tail()}"
                )

    async def _start_broker(self) -> None:
        if not self.plan.broker:
            return
        self.waits_for = "the broker starts"
        broker = Broker(self.settings.broker, self.folder / "broker", tethered=True)
        self._broker = BrokerKeeper(broker, self.settings.broker.start_timeout_s)
        bootstrap = await self._broker.start()
        self.waits_for = ""
        log = dataclasses.replace(self.settings.log, bootstrap=bootstrap)
        self.settings = dataclasses.replace(self.settings, log=log)
        self._spawn(self._broker.keep())

    async def _resolve_models(self) -> None:
        """Resolve each model once, so that all processes use one folder and one served name."""
        engine, resolved = self.settings.worker.engine, list(self.settings.models)
        for number, model in enumerate(resolved):
            lead = f"model {model.served_name}: " if len(resolved) > 1 else ""

            def report(what: str, lead: str = lead) -> None:
                self.waits_for = lead + what

            resolved[number] = await asyncio.to_thread(resolve_model, model, engine, report=report)
        check_names(resolved)
        self.settings = self.settings.with_models([resolve_adapters(model) for model in resolved])
        self.waits_for = ""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _write_state(self) -> None:
        while True:
            state = StackState(
                bootstrap=self.bootstrap,
                ready=self.ready,
                gateways=self.gateway_urls,
                processes=self.rows(),
                waits_for=self.waits_for,
                models=[model.served_name for model in self.settings.models],
            )
            self._files.write(state)
            await asyncio.sleep(_WRITE_S)
            for order in take_orders(self.folder):
                if order.worker in self._orders:
                    self._orders[order.worker].cancel()  # it only waits
                self._orders[order.worker] = asyncio.create_task(self._follow_order(order))

    async def _follow_order(self, order: LoadModel) -> None:
        try:
            await self.load_model(order.worker, order.model)
        except TriviumError as error:
            log.warning("%s: %s", order.worker, error.message)


def _with_all_models(plan: StackPlan, settings: Settings) -> StackPlan:
    """Return the plan; where it names no models and there are several, each gets its counts."""
    if plan.models or not settings.other_models:
        return plan
    return plan.for_models({model.served_name: plan.counts() for model in settings.models})
