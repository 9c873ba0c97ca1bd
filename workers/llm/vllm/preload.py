"""What a fork server for vLLM's processes imports, and with which environment. Imports none of it.

Only for vLLM on CPUs: a device that one process has opened is no other's. vLLM sets some variables
before it starts a process, which must be there before the libraries that read them; where these
differ, nothing is forked (`workers/forks.py`), and the worker's log says which.
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
    "vllm.v1.worker.cpu_worker",  # it wants to be the first
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
    """vLLM compiles a few small functions in any case, the first log-probabilities for 20 s."""
    return {"TORCHDYNAMO_DISABLE": "1"} if settings.enforce_eager else {}


def is_on_cpu() -> bool:
    """Whether vLLM is there, and made for CPUs; the names of packages tell vLLM itself."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in name + importlib.metadata.version(name)
    return False


def environment(environ: Mapping[str, str], settings: VllmSettings) -> dict[str, str]:
    """The environment of processes with this one, as vLLM will have made it."""
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
