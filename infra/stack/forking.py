"""Which processes of a stack are forked from one that has imported vLLM, and how that one is made.

Engines on CPUs, and the embedding workers beside them, which need most of the same libraries.
"""

from pathlib import Path

from infra.processes.fork_server import ForkServer
from infra.stack.configuration import ENGINE_SECTIONS, Settings
from infra.stack.plan import StackPlan, engine_environ
from schemas.sections import build
from workers.llm.vllm import preload

_COMMAND = "infra.cli.operate.single_process"
_EMBEDDING = "workers.embed.embedders.sentence"


def fork_server(plan: StackPlan, settings: Settings, folder: Path) -> ForkServer | None:
    """Not started yet; None where nothing is to be forked."""
    if settings.worker.engine != "vllm" or not plan.engine_names() or not preload.is_on_cpu():
        return None
    section = build("vllm", ENGINE_SECTIONS["vllm"], settings.engines.get("vllm", {}))
    modules = [*preload.MODULES, _COMMAND, *[_EMBEDDING] * bool(plan.embedding)]
    environ = preload.environment(engine_environ(plan, folder), section)
    return ForkServer(modules, environ, folder / "logs" / "forks.log")
