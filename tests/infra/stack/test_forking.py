"""Which processes of a stack are forked, and by whom."""

from pathlib import Path

import pytest

from infra.stack.configuration import Settings
from infra.stack.forking import fork_servers
from infra.stack.plan import StackPlan
from schemas.settings import ModelSettings
from workers.config import WorkerSettings
from workers.llm.vllm import preload

ALL = StackPlan(replica=1, retrieval=1, embedding=1, bridges=1)


def forked(engine: str, plan: StackPlan = ALL) -> dict[str, str]:
    """The title of the fork server for each first part of a name."""
    settings = Settings(worker=WorkerSettings(engine=engine))
    return {name: server.title for name, server in fork_servers(plan, settings, Path("/s")).items()}


def test_simulated_engines_share_small_fork_server() -> None:
    names = ("router", "gateway", "bridge", "prefill", "decode", "replica")
    assert forked("sim") == dict.fromkeys(names, "Trivium")


@pytest.mark.parametrize("other_model", [False, True])
def test_simulated_engines_that_parse_share_own_fork_server(other_model: bool) -> None:
    model = ModelSettings(tool_parser="hermes", reasoning_parser="none")
    settings = Settings(worker=WorkerSettings(engine="sim"))
    models = [ModelSettings(name="plain"), model] if other_model else [model]
    settings = settings.with_models(models)
    servers = fork_servers(ALL, settings, Path("/s"))
    titles = {name: server.title for name, server in servers.items()}
    small = dict.fromkeys(("router", "gateway", "bridge"), "Trivium")
    assert titles == small | dict.fromkeys(("prefill", "decode", "replica"), "Parsers")


@pytest.mark.skipif(not preload.is_on_cpu(), reason="needs vLLM for CPUs, which is not installed")
def test_vllm_processes_have_own_fork_server() -> None:
    small = dict.fromkeys(("router", "gateway", "bridge"), "Trivium")
    large = dict.fromkeys(("prefill", "decode", "replica", "embedding"), "vLLM")
    assert forked("vllm") == small | large
    assert forked("vllm", StackPlan(prefill=0, decode=0, embedding=1)) == {
        name: small[name] for name in ("router", "gateway")
    }


def test_vllm_on_device_is_not_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "is_on_cpu", lambda: False)
    assert {*forked("vllm").values()} == {"Trivium"}
