"""The modules and environment of a fork server for vLLM's processes. Imports none of the modules.

Only for vLLM on CPUs, because a forked process cannot use a device that its parent has opened. vLLM
sets some variables before it starts a process. They must be set before the libraries that read them
are imported. If they differ, no process is forked (`workers/forks.py`), and the worker's log names
them.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from workers.llm.vllm.settings import VllmSettings

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
MODULES = (
    "vllm.v1.worker.cpu_worker",  # must be imported first
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "workers.llm.vllm.launch",
)
SILENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
UNLESS_SET = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
_OF_VLLM = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
}


def eager(settings: VllmSettings) -> dict[str, str]:
    """Return a variable that turns compilation off, if `enforce_eager` is set.

    Otherwise vLLM compiles a few small functions nevertheless: 20 s at the first log-probabilities.
    """
    return {"TORCHDYNAMO_DISABLE": "1"} if settings.enforce_eager else {}


def is_on_cpu() -> bool:
    """Return whether vLLM is installed in its build for CPUs, by its package's name and version."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in name + importlib.metadata.version(name)
    return False


def environment(environ: Mapping[str, str], settings: VllmSettings) -> dict[str, str]:
    """Return the environment that vLLM will give its processes, for this one of the worker."""
    variables = {**UNLESS_SET, **environ, **SILENT, **_OF_VLLM, **eager(settings)}
    variables["NUMEXPR_MAX_THREADS"] = str(len(os.sched_getaffinity(0)))
    preloaded = [variables.get("LD_PRELOAD", ""), _library("torch", "lib/libgomp*.so*")]
    if "libgomp" in preloaded[0]:
        preloaded.pop()
    variables["LD_PRELOAD"] = ":".join(
        filter(None, [_library("vllm", "libs/libtcmalloc*"), *preloaded])
    )
    return variables


def _library(package: str, pattern: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is installed"
    return next((str(path) for path in Path(spec.origin).parent.glob(pattern)), "")
