"""Which processes of a stack are forked, and by whom."""

from pathlib import Path

import pytest

from infra.stack.configuration import Settings
from infra.stack.forking import fork_servers
from infra.stack.plan import StackPlan
from workers.config import WorkerSettings
from workers.llm.vllm import preload

ALL = StackPlan(replica=1, retrieval=1, embedding=1, bridges=1)


def forked(engine: str, plan: StackPlan = ALL) -> dict[str, str]:
    """By the first part of names."""
    settings = Settings(worker=WorkerSettings(engine=engine))
    return {name: each.title for name, each in fork_servers(plan, settings, Path("/s")).items()}


def test_simulated_engines_are_forked_with_all_that_is_small() -> None:
    names = ("router", "gateway", "bridge", "prefill", "decode", "replica")
    assert forked("sim") == dict.fromkeys(names, "Trivium")


@pytest.mark.skipif(not preload.is_on_cpu(), reason="needs vLLM for CPUs, which is not installed")
def test_what_needs_vllm_or_most_of_its_libraries_has_a_server_of_its_own() -> None:
    small = dict.fromkeys(("router", "gateway", "bridge"), "Trivium")
    large = dict.fromkeys(("prefill", "decode", "replica", "embedding"), "vLLM")
    assert forked("vllm") == small | large
    assert forked("vllm", StackPlan(prefill=0, decode=0, embedding=1)) == {
        name: small[name] for name in ("router", "gateway")
    }


def test_vllm_on_a_device_is_not_imported_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "is_on_cpu", lambda: False)
    assert {*forked("vllm").values()} == {"Trivium"}
