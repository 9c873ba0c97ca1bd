"""Plans which processes `trivium up` runs: their counts, commands and environments.

It only decides; `infra/stack/launcher.py` starts them.
"""

import itertools
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra.processes.fork_server import ForkServer
from infra.processes.supervisor import ProcessSpec
from infra.stack.configuration import ENGINE_SECTIONS, Settings, without_sections
from schemas.errors import ConfigError
from schemas.records import MemberKind
from schemas.sections import Natural, Positive, build, section
from streams.gateway.http.listener import LISTEN_NAMES
from workers.llm.vllm.preload import BIND_VARIABLE

# One thread each: by default, the libraries of every process start one per core.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WORKER_ROLES = ("prefill", "decode", "replica")
# Secrets by the kind that uses them, besides the log's: a bridge names responses as gateways do.
_SECRETS = {"gateway": ("TRIVIUM_GATEWAY_",), "bridge": ("TRIVIUM_GATEWAY_EVENT_KEY",)}


@section("plan")
class StackPlan:
    """Counts by kind. `broker` is False where the cluster is external."""

    prefill: Natural = 1
    decode: Natural = 1
    replica: Natural = 0
    retrieval: Natural = 0  # workers, assigned to the shards in turn
    shards: Positive = 1
    embedding: Natural = 0
    embedders: tuple[str, ...] = ()  # pools of other embedding models, one entry for each worker
    routers: Natural = 1
    gateways: Natural = 1
    bridges: Natural = 0
    broker: bool = True
    away: tuple[str, ...] = ()  # drained workers, whose numbers are below the counts
    places: Positive = 1  # simulated nodes, to which workers are assigned by their numbers
    seats: Natural = 0  # engines that share the cores; 0: as many as there are
    models: Mapping[str, str] = field(default_factory=dict)  # by worker; empty: there is one model

    def __post_init__(self) -> None:
        if 0 < self.retrieval < self.shards:
            raise ConfigError(
                f"shards: expected 1 to {max(1, self.retrieval)}, as many as there are retrieval "
                f"workers at most, found {self.shards}"
            )

    def for_models(self, counts: Mapping[str, Mapping[str, int]]) -> "StackPlan":
        """Return the plan with these counts by model and role; the numbers of names go on over the
        models."""
        for its_counts in counts.values():
            only: dict[str, Any] = dict(its_counts)
            plan = replace(self, **only)  # it checks them
        if len(counts) == 1:
            return plan
        totals: dict[str, Any] = dict.fromkeys(WORKER_ROLES, 0)
        models: dict[str, str] = {}
        for model, its_counts in counts.items():
            for role in WORKER_ROLES:
                for _ in range(its_counts.get(role, 0)):
                    models[f"{role}-{totals[role]}"] = model
                    totals[role] += 1
        return replace(self, **totals, models=models)

    def counts(self, model: str = "") -> dict[str, int]:
        """Return the workers of a model, or of all, by role."""
        roles = [
            name.rpartition("-")[0]
            for name in self.engine_names()
            if not model or self.models.get(name) == model
        ]
        return {role: roles.count(role) for role in WORKER_ROLES}

    @property
    def serves(self) -> bool:
        """Return whether the plan has all that a gateway needs to accept calls of some model."""
        pools = [self.counts(model) for model in {*self.models.values()} or {""}]
        can_answer = any(p["replica"] or (p["prefill"] and p["decode"]) for p in pools)
        return bool(self.gateways and self.routers and can_answer)

    def gateway_names(self) -> list[str]:
        """Return the ids of gateways that accept calls; bridges are gateways without an address."""
        return [f"gateway-{number}" for number in range(self.gateways)]

    def names(self) -> dict[str, MemberKind]:
        """Return member ids in the order of starting, with their kinds."""
        kinds = {f"router-{number}": MemberKind.ROUTER for number in range(self.routers)}
        for role in WORKER_ROLES:
            for number in range(getattr(self, role)):
                kinds[f"{role}-{number}"] = MemberKind.WORKER
        kinds.update({f"retrieval-{n}": MemberKind.WORKER for n in range(self.retrieval)})
        kinds.update({f"embedding-{n}": MemberKind.WORKER for n in range(self.embedding)})
        kinds.update({f"embedder-{n}": MemberKind.WORKER for n in range(len(self.embedders))})
        kinds.update({f"gateway-{n}": MemberKind.GATEWAY for n in range(self.gateways)})
        kinds.update({f"bridge-{n}": MemberKind.GATEWAY for n in range(self.bridges)})
        return {name: kind for name, kind in kinds.items() if name not in self.away}

    def engine_names(self) -> list[str]:
        """Return the workers with a language model, which share the cores."""
        return [name for name in self.names() if name.partition("-")[0] in WORKER_ROLES]

    def with_worker(self, role: str, model: str = "") -> tuple["StackPlan", str]:
        """Add a prefill, decode or replica worker of a model; return the plan and the worker's
        name."""
        numbers = (f"{role}-{number}" for number in itertools.count())
        name = next(name for name in numbers if name not in self.names())
        plan = self.with_model(name, model) if model else self
        if name in self.away:
            return replace(plan, away=tuple(worker for worker in self.away if worker != name)), name
        return replace(plan, **{role: getattr(self, role) + 1}), name

    def with_model(self, worker: str, model: str) -> "StackPlan":
        """Return the plan with this worker for this model."""
        return replace(self, models={**self.models, worker: model})

    def with_counts(self, model: str, counts: Mapping[str, Any]) -> "StackPlan":
        """Return the plan with other counts, by field; those of LLM workers are of this model."""
        plan = self
        for name, count in counts.items():
            if not self.models or name not in WORKER_ROLES:
                plan = replace(plan, **{name: count})
                continue
            workers = [
                worker
                for worker in plan.engine_names()
                if worker.rpartition("-")[0] == name and plan.models.get(worker) == model
            ]
            for worker in workers[count:]:
                plan = plan.without(worker)
            for _ in range(count - len(workers)):
                plan, _name = plan.with_worker(name, model)
        return plan

    def without(self, worker: str) -> "StackPlan":
        """Return the plan without this worker, whichever number it has."""
        return replace(self, away=(*self.away, worker))


def check_policies(plan: StackPlan, settings: Settings) -> None:
    """Raise ConfigError for a policy or an orchestration that no worker of the plan can meet, of
    any model."""
    if not plan.models:
        return _check_policies(plan.counts(), settings)
    for model in settings.models:
        try:
            counts = plan.counts(model.served_name)
            _check_policies(counts, settings.for_model(model.served_name))
        except ConfigError as error:
            raise ConfigError(f"model {model.served_name}: {error.message}") from None


def _check_policies(counts: Mapping[str, int], settings: Settings) -> None:
    wish, engine = settings.router.orchestration, settings.worker.engine
    prefill, decode, replica = (counts[role] for role in WORKER_ROLES)
    if settings.router.policy == "pairs" and not (prefill and decode) and replica:
        raise ConfigError(
            "router.policy: pairs needs prefill and decode workers, and one of these pools is "
            "empty; start some with --prefill and --decode, or choose another policy"
        )
    if settings.router.policy == "replica" and not replica and prefill + decode:
        raise ConfigError(
            "router.policy: replica needs replicas, and there are none; start some with --replica, "
            "or choose another policy"
        )
    if wish == "auto" or not (prefill and decode) or engine not in ENGINE_SECTIONS:
        return
    can = build(engine, ENGINE_SECTIONS[engine], settings.engines.get(engine, {})).orchestrations
    if can and wish not in can:
        advice = '; set vllm.kv_transfer = "push" for all three' if engine == "vllm" else ""
        raise ConfigError(
            f"router.orchestration: expected auto or one that two engines {engine} can do as they "
            f"are set, {', '.join(can)}, found {wish}{advice}"
        )


def process_specs(
    plan: StackPlan,
    *,
    folder: Path,
    config: Path,
    engine: str,
    gateway_port: int,
    secrets: Mapping[str, str] = MappingProxyType({}),
    used_seats: Mapping[str, int] = MappingProxyType({}),
    forks: Mapping[str, ForkServer] = MappingProxyType({}),
    listeners: Mapping[str, socket.socket] = MappingProxyType({}),
) -> list[ProcessSpec]:
    """Return a spec for each process of the plan except the broker.

    `secrets` join the environment. `used_seats` are the seats of running workers. `forks` are by
    the first part of a name, `listeners` by the whole name.
    """
    names = plan.names()
    seats = assign_seats(plan.engine_names(), used_seats)
    shares = _shares(plan, seats)
    base = environ(folder)
    specs = []
    for name, kind in names.items():
        which, _, number = name.partition("-")
        env, flags = base | _secrets_of(which, secrets), ["--id", name]
        kind_name = kind.value
        if which == "retrieval":
            kind_name = which
            flags += ["--shard", f"{int(number) % plan.shards}/{plan.shards}"]
        elif which in ("embedding", "bridge"):
            kind_name = which
        elif which == "embedder":
            kind_name = "embedding"
            flags += ["--model", plan.embedders[int(number)]]
        elif kind is MemberKind.WORKER:
            flags += ["--role", which]
            if model := plan.models.get(name):
                flags += ["--model", model]
            if engine == "vllm":
                env |= _vllm_env(shares[seats[name]])
        if plan.places > 1 and kind is MemberKind.WORKER:
            env |= {"TRIVIUM_LOG_PLACE": str(int(number) % plan.places)}
        if which == "gateway" and gateway_port:
            flags += ["--port", str(gateway_port + int(number))]
        command = [sys.executable, "-m", "infra.cli.app", "run", kind_name, *flags]
        specs.append(
            ProcessSpec(
                name=name,
                command=(*command, "--config", str(config)),
                log_file=folder / "logs" / f"{name}.log",
                env=env,
                forks=forks.get(which),
                listener=listeners.get(name),
            )
        )
    return specs


def _secrets_of(which: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that a process of this kind uses: all need the log's, few the callers'."""
    uses = ("TRIVIUM_LOG_", *_SECRETS.get(which, ()))
    return {name: text for name, text in secrets.items() if name.startswith(uses)}


def environ(folder: Path) -> dict[str, str]:
    """Return the environment variables that all processes share."""
    variables = {**without_sections(os.environ), "TRIVIUM_HOME": str(folder)}
    for name in LISTEN_NAMES:  # meant for the launcher, not for its children
        variables.pop(name, None)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # the cache halves the start of vLLM's processes
    return {**variables, **dict.fromkeys(_ONE_THREAD, "1")}


def engine_environ(plan: StackPlan, folder: Path) -> dict[str, str]:
    """Return the environment of a vLLM worker without its cores; all workers have as many."""
    variables = {
        **environ(folder),
        **_vllm_env(_shares(plan, assign_seats(plan.engine_names(), {}))[0]),
    }
    del variables[BIND_VARIABLE]
    return variables


def _shares(plan: StackPlan, seats: Mapping[str, int]) -> list[list[int]]:
    count = max(plan.seats, *(seat + 1 for seat in seats.values()), 0)
    return core_shares(sorted(os.sched_getaffinity(0)), count)


def assign_seats(workers: Iterable[str], used_seats: Mapping[str, int]) -> dict[str, int]:
    """Return a seat for each worker: present ones keep theirs, new ones get free ones."""
    names = list(workers)
    seats = {name: used_seats[name] for name in names if name in used_seats}
    free = (seat for seat in itertools.count() if seat not in seats.values())
    return seats | {name: next(free) for name in names if name not in seats}


def with_roles(spec: ProcessSpec, roles: Iterable[str]) -> ProcessSpec:
    """Return the spec of a worker with other roles; without roles, return it unchanged."""
    return _with_option(spec, "--role", ",".join(roles))


def with_model(spec: ProcessSpec, model: str) -> ProcessSpec:
    """Return the spec of a worker with another model."""
    return _with_option(spec, "--model", model)


def _with_option(spec: ProcessSpec, option: str, value: str) -> ProcessSpec:
    """Return the spec with another value of an option, if it has the option."""
    command = list(spec.command)
    if option not in command or not value:
        return spec
    command[command.index(option) + 1] = value
    return replace(spec, command=tuple(command))


def core_shares(cores: list[int], count: int) -> list[list[int]]:
    """Split the machine's cores among `count` workers; they share where cores are too few."""
    if count == 0:
        return []
    if len(cores) < count:
        return [[cores[number % len(cores)]] for number in range(count)]
    size = len(cores) // count
    return [cores[number * size : (number + 1) * size] for number in range(count)]


def _vllm_env(cores: list[int]) -> Mapping[str, str]:
    return {
        BIND_VARIABLE: ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
    }
