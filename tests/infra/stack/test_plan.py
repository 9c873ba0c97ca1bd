"""What `trivium up` would start, without starting it."""

from pathlib import Path
from typing import Any

import pytest

from infra.processes.supervisor import ProcessSpec
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import (
    StackPlan,
    assign_seats,
    core_shares,
    process_specs,
    with_model,
    with_roles,
)
from schemas.errors import ConfigError
from schemas.settings import ModelSettings
from streams.config import RouterSettings
from workers.config import WorkerSettings


def specs(plan: StackPlan, engine: str = "sim", port: int = 8000) -> dict[str, ProcessSpec]:
    all_specs = process_specs(
        plan, folder=Path("/state"), config=Path("/state/x.toml"), engine=engine, gateway_port=port
    )
    return {spec.name: spec for spec in all_specs}


def test_process_specs_have_names_roles_and_logs() -> None:
    specs_by_name = specs(StackPlan(prefill=2, decode=1, replica=1, routers=2, gateways=2))
    assert list(specs_by_name) == [
        *("router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "replica-0"),
        *("gateway-0", "gateway-1"),
    ]
    worker = specs_by_name["prefill-1"]
    expected = ("worker", "--id", "prefill-1", "--role", "prefill", "--config", "/state/x.toml")
    assert worker.command[4:] == expected
    assert worker.log_file == Path("/state/logs/prefill-1.log")
    assert worker.env["TRIVIUM_HOME"] == "/state"
    assert specs_by_name["gateway-1"].command[7:9] == ("--port", "8001")


def deployment(engine: str, policy: str, orchestration: str, push: bool = False) -> Settings:
    section = {"kv_transfer": "push"} if push else {}
    return Settings(
        worker=WorkerSettings(engine=engine),
        router=RouterSettings(policy=policy, orchestration=orchestration),
        engines={"vllm": section},
    )


@pytest.mark.parametrize(
    ("engine", "policy", "orchestration", "push", "counts", "error"),
    [
        ("vllm", "learned", "auto", False, {}, ""),
        ("vllm", "learned", "prefill_first", False, {}, ""),
        ("vllm", "learned", "concurrent", False, {}, "prefill_first, found concurrent; set vllm"),
        ("vllm", "learned", "concurrent", True, {}, ""),
        ("vllm", "learned", "decode_first", True, {}, ""),
        ("vllm", "learned", "decode_first", False, {}, "prefill_first, found decode_first; set"),
        ("sim", "learned", "decode_first", False, {}, ""),
        ("vllm", "learned", "decode_first", False, {"prefill": 0, "decode": 0, "replica": 1}, ""),
        ("sim", "replica", "auto", False, {}, "replica needs replicas, and there are none"),
        ("sim", "replica", "auto", False, {"replica": 1}, ""),
        ("sim", "replica", "auto", False, {"prefill": 0, "decode": 0}, ""),
        ("sim", "pairs", "auto", False, {}, ""),
        ("sim", "pairs", "auto", False, {"prefill": 0, "replica": 1}, "pairs needs prefill and"),
    ],
)
def test_stack_rejects_settings_that_no_worker_supports(
    engine: str, policy: str, orchestration: str, push: bool, counts: dict[str, Any], error: str
) -> None:
    """The setting would otherwise be changed silently."""
    settings, plan = deployment(engine, policy, orchestration, push), StackPlan(**counts)
    if not error:
        Stack(settings, plan)
        return
    with pytest.raises(ConfigError, match=error):
        Stack(settings, plan)


def test_moved_worker_restarts_with_its_roles() -> None:
    specs_by_name = specs(StackPlan(retrieval=1))
    moved = with_roles(specs_by_name["decode-0"], ("prefill", "decode"))
    assert moved.command[4:8] == ("worker", "--id", "decode-0", "--role")
    assert moved.command[8:10] == ("prefill,decode", "--config")
    assert with_roles(moved, ("decode",)) == specs_by_name["decode-0"]
    assert with_roles(moved, ()) == moved
    for name in ("retrieval-0", "router-0"):
        assert with_roles(specs_by_name[name], ("prefill",)) == specs_by_name[name]


TWO = {"a": {"prefill": 1, "decode": 1}, "b": {"prefill": 2, "replica": 1}}


def test_numbers_of_worker_names_go_on_over_the_models() -> None:
    plan = StackPlan(routers=0, gateways=0).for_models(TWO)
    assert plan.models == {
        "prefill-0": "a",
        "decode-0": "a",
        "prefill-1": "b",
        "prefill-2": "b",
        "replica-0": "b",
    }
    assert list(plan.models) != list(plan.names()) and {*plan.models} == {*plan.names()}
    assert plan.counts("b") == {"prefill": 2, "decode": 0, "replica": 1}
    assert plan.counts() == {"prefill": 3, "decode": 1, "replica": 1}
    command = specs(plan)["prefill-2"].command
    assert command[7:11] == ("--role", "prefill", "--model", "b")
    single = StackPlan().for_models({"a": {"prefill": 2, "decode": 0, "replica": 1}})
    assert single == StackPlan(prefill=2, decode=0, replica=1)
    with pytest.raises(ConfigError, match="plan.prefill: expected at least 0"):
        StackPlan().for_models({"a": {"prefill": -1}, "b": {}})


def test_plan_serves_if_one_model_has_both_pools() -> None:
    halves = {"a": {"prefill": 1}, "b": {"decode": 1}}
    assert not StackPlan().for_models(halves).serves
    assert StackPlan().for_models({**halves, "c": {"replica": 1}}).serves


def test_workers_are_added_drained_and_moved_by_model() -> None:
    plan = StackPlan().for_models(TWO)
    plan, name = plan.with_worker("decode", "b")
    assert (name, plan.counts("b")["decode"]) == ("decode-1", 1)
    plan, name = plan.without("decode-0").with_worker("decode", "b")
    assert (name, plan.counts("a")["decode"], plan.counts("b")["decode"]) == ("decode-0", 0, 2)
    plan = plan.with_model("prefill-1", "a")
    assert (plan.counts("a")["prefill"], plan.counts("b")["prefill"]) == (2, 1)
    plan = plan.with_counts("b", {"replica": 0, "prefill": 2, "routers": 2})
    assert plan.routers == 2
    assert plan.counts("b") == {"prefill": 2, "decode": 2, "replica": 0}
    spec = specs(StackPlan().for_models(TWO))["replica-0"]
    assert with_model(with_model(spec, "a"), "b") == spec != with_model(spec, "a")


def test_stack_gives_each_model_the_counts_of_a_plan_without_models() -> None:
    settings = Settings(
        worker=WorkerSettings(engine="sim"),
        model=ModelSettings(name="a"),
        other_models=(ModelSettings(),),
    )
    stack = Stack(settings, StackPlan(prefill=0, decode=0, replica=2))
    assert stack.plan.counts("a") == stack.plan.counts("sim")
    assert [row.model for row in stack.rows() if row.kind == "worker"] == ["a", "a", "sim", "sim"]


def test_stack_rejects_settings_that_no_worker_of_one_model_supports() -> None:
    settings = Settings(
        worker=WorkerSettings(engine="sim"),
        model=ModelSettings(name="a"),
        other_models=(ModelSettings(name="b"),),
        router=RouterSettings(policy="pairs"),
    )
    with pytest.raises(ConfigError, match=r"model b: router.policy: pairs needs prefill and"):
        Stack(settings, StackPlan().for_models(TWO))


def test_plan_reuses_first_free_worker_name() -> None:
    plan = StackPlan(prefill=2, decode=2).without("decode-0")
    assert [name for name in plan.names() if "code" in name] == ["decode-1"]
    plan, name = plan.with_worker("decode")
    assert (name, plan) == ("decode-0", StackPlan(prefill=2, decode=2))
    plan, name = plan.with_worker("decode")
    assert (name, plan.decode) == ("decode-2", 3)
    assert specs(plan)["decode-2"].command[8] == "decode"


def test_gateway_spec_without_fixed_port_has_no_port_flag() -> None:
    assert "--port" not in specs(StackPlan(), port=0)["gateway-0"].command


def test_process_environment_allows_bytecode_and_sets_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("TRIVIUM_LOG_BOOTSTRAP", "in the settings file already")
    env = specs(StackPlan())["decode-0"].env
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert "TRIVIUM_LOG_BOOTSTRAP" not in env
    assert env["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env


def test_vllm_workers_are_bound_to_cores() -> None:
    env = specs(StackPlan(prefill=1, decode=1), engine="vllm")
    binds = {env[name].env["VLLM_CPU_OMP_THREADS_BIND"] for name in ("prefill-0", "decode-0")}
    assert all(binds)


def test_added_vllm_worker_gets_unused_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers that were there keep their cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    plan = StackPlan(prefill=1, decode=1, seats=3)
    seats = assign_seats(plan.engine_names(), {})
    assert [specs(plan, engine="vllm")[n].env[bound] for n in seats] == ["0,1", "2,3"]
    plan, name = plan.with_worker("prefill")
    all_specs = process_specs(
        plan,
        folder=Path("/s"),
        config=Path("/s/x"),
        engine="vllm",
        gateway_port=0,
        used_seats=seats,
    )
    assert {spec.name: spec.env[bound] for spec in all_specs if bound in spec.env} == {
        "prefill-0": "0,1",
        "decode-0": "2,3",
        "prefill-1": "4,5",
    }
    seats = assign_seats(plan.engine_names(), seats)
    plan, name = plan.without("decode-0").with_worker("prefill")
    assert assign_seats(plan.engine_names(), seats) == {
        "prefill-0": 0,
        "prefill-1": 2,
        "prefill-2": 1,
    }


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 3, [[0], [1], [0]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([4], 1, [[4]]),
        ([0], 0, []),
    ],
)
def test_core_shares_split_cores(cores: list[int], count: int, shares: list[list[int]]) -> None:
    assert core_shares(cores, count) == shares


def test_plan_rejects_negative_count() -> None:
    with pytest.raises(ConfigError, match="decode: expected at least 0, found -1"):
        StackPlan(decode=-1)


def test_embedding_workers_are_separate_processes() -> None:
    specs_by_name = specs(StackPlan(prefill=0, decode=0, retrieval=1, embedding=2, gateways=1))
    assert list(specs_by_name) == [
        *("router-0", "retrieval-0", "embedding-0", "embedding-1", "gateway-0"),
    ]
    expected = ("embedding", "--id", "embedding-1", "--config", "/state/x.toml")
    assert specs_by_name["embedding-1"].command[4:] == expected


def test_other_embedding_models_have_workers_of_their_own() -> None:
    plan = StackPlan(prefill=0, decode=0, embedding=1, embedders=("law", "law", "small"))
    specs_by_name = specs(plan)
    assert list(specs_by_name)[1:5] == ["embedding-0", "embedder-0", "embedder-1", "embedder-2"]
    for name, model in (("embedder-0", "law"), ("embedder-2", "small")):
        expected = ("embedding", "--id", name, "--model", model, "--config", "/state/x.toml")
        assert specs_by_name[name].command[4:] == expected
    assert "--model" not in specs_by_name["embedding-0"].command
    assert "embedder-1" not in plan.without("embedder-1").names()
