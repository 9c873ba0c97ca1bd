"""The plugin's parts that need no engine; what they do to one is in `test_engine.py`."""

import ast
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.waits import PATIENCE_S
from workers.llm.vllm.plugin import (
    NICE_VARIABLE,
    OWNER_VARIABLE,
    PROGRESS_SLEEP_US,
    calm_nixl,
    keeping_draws,
)


def fake_api() -> Any:
    return SimpleNamespace(nixlBind=SimpleNamespace(nixlAgent=lambda name, config: (name, config)))


def config(**fields: Any) -> Any:
    return SimpleNamespace(**{"useProgThread": True, "pthrDelay": 0, **fields})


def test_nixl_agents_sleep_between_events() -> None:
    api = fake_api()
    calm_nixl(api)
    calm_nixl(api)  # vLLM may call plugins more than once
    name, agent_config = api.nixlBind.nixlAgent("a", config())
    assert (name, agent_config.pthrDelay) == ("a", PROGRESS_SLEEP_US)


def test_nixl_agents_keep_configured_delay() -> None:
    api = fake_api()
    calm_nixl(api)
    assert api.nixlBind.nixlAgent("a", config(pthrDelay=5))[1].pthrDelay == 5
    assert api.nixlBind.nixlAgent("a", config(useProgThread=False))[1].pthrDelay == 0


def test_sampling_skips_discarded_rows_and_restores_generators() -> None:
    """vLLM rewinds a discarded sample by an offset that CPU generators lack, and fails."""
    generator_rows: list[list[int]] = []

    def sample(self: Any, grammar: None) -> str:
        generator_rows.append(sorted(self.input_batch.generators))
        if grammar is not None:
            raise RuntimeError
        return "sampled"

    generators = {0: "a", 1: "b", 3: "d"}
    batch = SimpleNamespace(num_reqs=4, generators=dict(generators))
    dropped = np.array([False, True, True, False, True])
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=dropped))
    wrapped = keeping_draws(keeping_draws(sample))
    assert wrapped(runner, None) == "sampled"
    with pytest.raises(RuntimeError):
        wrapped(runner, "a form")
    assert generator_rows == [[0, 3], [0, 3]] and batch.generators == generators


def test_watch_ends_process_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watching = (
        "import sys, threading; from workers.llm.vllm.plugin import watch; "
        "watch(int(sys.argv[1])); print('watching', flush=True); threading.Event().wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", watching, str(owner.pid)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"watching\n"
        owner.kill()
        owner.communicate()
        assert child.wait(timeout=PATIENCE_S) == -signal.SIGKILL


def test_watch_ends_process_of_dead_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    code = f"from workers.llm.vllm.plugin import watch; watch({owner.pid})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_engine_threads_get_lower_priority() -> None:
    """Present and future threads get the priority; the parent process keeps its own."""
    code = (
        "import os, threading; from workers.llm.vllm.plugin import register;"
        "wait = threading.Event().wait;"
        "threading.Thread(target=wait, daemon=True).start(); register();"
        "threading.Thread(target=wait, daemon=True).start();"
        "print([os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')])"
    )
    env = {**os.environ, OWNER_VARIABLE: str(os.getpid()), NICE_VARIABLE: "7"}
    before = os.getpriority(os.PRIO_PROCESS, 0)
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    threads = ast.literal_eval(result.stdout.splitlines()[-1])
    assert len(threads) >= 3
    assert set(threads) == {max(7, before)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
