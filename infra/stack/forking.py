"""Decides which processes of a stack are forked, and from which fork server.

One server has imported vLLM, for engines on CPUs and for the embedding workers beside them, which
need most of the same libraries. Another is small, for routers, gateways, bridges and simulated
engines, whose imports take most of their start. Simulated engines that parse answers have a server
of their own, with vLLM's parsers. A retrieval worker is started without a fork.
"""

from pathlib import Path

from infra.processes.fork_server import ForkServer
from infra.stack.configuration import ENGINE_SECTIONS, Settings
from infra.stack.plan import WORKER_ROLES, StackPlan, engine_environ, environ
from schemas.model.parsers import NO_PARSERS, known_parsers
from schemas.sections import build
from workers.llm.vllm import preload

_COMMAND = "infra.cli.operate.single_process"
_EMBEDDING = "workers.embed.embedders.sentence"
_SMALL = {
    "router": ("streams.agents.lifecycle",),
    "gateway": ("streams.gateway.app", "streams.calls.stream.event_key"),
    "bridge": ("streams.bridge.process",),
}
_SIMULATED = ("infra.stack.engine_source", "workers.runtime", "workers.llm.sim.engine")
_PARSING = "workers.llm.parsing.vllm_parser"


def fork_servers(plan: StackPlan, settings: Settings, folder: Path) -> dict[str, ForkServer]:
    """Return fork servers, not started yet, by the first part of the names of their processes."""
    present, engine = {name.partition("-")[0] for name in plan.names()}, settings.worker.engine
    engines = present & set(WORKER_ROLES)
    small = {which: modules for which, modules in _SMALL.items() if which in present}
    parses = bool(engines) and any(known_parsers(m) != NO_PARSERS for m in settings.models)
    if engine == "sim" and not parses:
        small |= dict.fromkeys(engines, _SIMULATED)
    modules = dict.fromkeys(name for group in small.values() for name in group)
    server = ForkServer("Trivium", [_COMMAND, *modules], environ(folder), folder / "logs")
    servers = dict.fromkeys(small, server)
    if engine == "sim" and parses:
        imports = [_COMMAND, *_SIMULATED, _PARSING]
        server = ForkServer("Parsers", imports, environ(folder), folder / "logs")
        servers |= dict.fromkeys(engines, server)
    if engine == "vllm" and engines and preload.is_on_cpu():
        also = {"embedding"} & present
        section = build("vllm", ENGINE_SECTIONS["vllm"], settings.engines.get("vllm", {}))
        variables = preload.environment(engine_environ(plan, folder), section)
        if variables["OMP_NUM_THREADS"] != "1":
            also = set()  # they use one thread: a fork with another count would be refused
        imports = [*preload.MODULES, _COMMAND, *[_EMBEDDING] * len(also), *[_PARSING] * parses]
        server = ForkServer("vLLM", imports, variables, folder / "logs", has_children=True)
        servers |= dict.fromkeys(engines | also, server)
    return servers
