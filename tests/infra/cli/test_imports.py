"""What the start of a process imports: counted, since seconds differ from one machine to the next.

A module of ours or of a package that is not needed shows here as a heavy package or as a number.
"""

import os
import subprocess
import sys

import pytest

from tests.infra.cli.trivium_runner import PLAIN

HEAVY = {
    *("aiohttp", "aiokafka", "click", "croniter", "dateutil", "fastapi", "fastavro", "faust"),
    *("chardet", "httpx", "jinja2", "jsonschema", "lxml", "mammoth"),
    *("markdown_it", "mode", "numba", "numpy", "orjson", "prometheus_client", "pydantic"),
    *("pygments", "pypdfium2", "starlette", "tantivy", "tokenizers", "torch", "transformers"),
    *("uvicorn", "vllm"),
}
_PRINT_MODULES = "atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.__stderr__))"


def modules_after(code: str) -> set[str]:
    """Names of all modules that a Python program has imported at its end."""
    program = [sys.executable, "-c", f"import atexit, sys; {_PRINT_MODULES}; {code}"]
    env = {**os.environ, **PLAIN}
    process = subprocess.run(program, capture_output=True, text=True, env=env, check=True)
    return set(process.stderr.split())


def modules_after_command(*arguments: str) -> set[str]:
    """The same of a command line of `trivium`."""
    return modules_after(
        f"sys.argv = ['trivium', *{arguments}]; from infra.cli import app; app.main()"
    )


def packages(modules: set[str]) -> set[str]:
    """Their packages."""
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    ("arguments", "modules_max"),
    [
        (["--help"], 240),
        (["version"], 230),
        (["status", "--help"], 300),
        (["tail", "--help"], 300),
        (["replay", "--help"], 300),
        (["run", "--help"], 300),
        (["broker", "--help"], 250),
    ],
)
def test_help_imports_few_modules(arguments: list[str], modules_max: int) -> None:
    modules = modules_after_command(*arguments)
    assert not packages(modules) & HEAVY
    assert len(modules) <= modules_max


_COMMAND = "from infra.cli.commands import load_command; load_command('run'); import uvloop; "
_SETTINGS = _COMMAND + "from infra.stack.configuration import load; load(environ={}); "
_CODEC = _SETTINGS + "import streams.log.registry; "
_READER = {"aiokafka", "fastavro", "numpy", "pydantic"}  # of the log
_MEMBER = _READER | {"faust", "mode", "orjson"}  # of a group that shares its topics


@pytest.mark.parametrize(
    ("code", "heavy", "modules_max"),
    [
        (_SETTINGS, {"pydantic"}, 410),
        (_CODEC + "import streams.agents.lifecycle", _MEMBER, 900),
        (
            _CODEC + "import streams.gateway.app, streams.calls.stream.event_key",
            _READER
            | {"fastapi", "jinja2", "orjson", "prometheus_client", "starlette", "tokenizers"}
            | {"uvicorn"},
            960,
        ),
        (
            _CODEC + "import infra.stack.engine_source, workers.runtime, workers.models.folder, "
            "workers.llm.sim.engine",
            _READER | {"tokenizers"},
            690,
        ),
        (
            _CODEC + "import workers.embed.worker, workers.models.folder",
            _MEMBER | {"tokenizers"},
            860,
        ),
        (_CODEC + "import workers.retrieval.worker", _MEMBER | {"numba", "tantivy"}, 1_210),
    ],
    ids=["settings", "router", "gateway", "simulated worker", "embedding", "retrieval"],
)
def test_process_start_imports_only_needed_packages(
    code: str, heavy: set[str], modules_max: int
) -> None:
    """The imports are those of `infra/cli/operate/single_process.py` for each process."""
    modules = modules_after(code)
    assert packages(modules) & HEAVY == heavy
    assert len(modules) <= modules_max
