"""A whole stack through the command line, on simulated engines: up, status, chat, tail, down."""

import dataclasses
import json
from pathlib import Path

import pytest

from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.stack.statefile import read_state
from schemas.errors import ConfigError
from schemas.settings import LogSettings, ModelSettings
from tests.infra.cli.trivium_runner import trivium, trivium_here
from tests.long_leases import LONG_LEASES, long_leases
from tests.waits import START_S
from workers.config import WorkerSettings

SIM = {"prefill_base_ms": 1.0, "decode_step_ms": 1.0, "end_every_tokens": 0}


def settings(log: LogSettings) -> Settings:
    base = Settings(log=log, worker=WorkerSettings(engine="sim"), engines={"sim": SIM})
    return dataclasses.replace(base, gateway=dataclasses.replace(base.gateway, port=0))


def check_pool(home: Path, env: dict[str, str]) -> None:
    """The replica becomes something else and comes back."""
    code, _, errors = trivium_here("pool", "move", "r-9", "--to", "decode", home=home, env=env)
    assert (code, "no worker 'r-9' lives; expected one of: replica-0" in errors) == (2, True)
    move = ["pool", "move", "replica-0", "--to"]
    code, output, errors = trivium_here(*move, "prefill,decode", "--json", home=home, env=env)
    assert code == 0, errors
    assert json.loads(output)["roles"] == ["prefill", "decode"]
    rows = json.loads(trivium_here("status", "--json", home=home, env=env)[1])
    (row,) = [row for row in rows if row["kind"] == "worker"]
    assert row["roles"] == ["prefill", "decode"]
    assert row["leases"].keys() == {"prefill", "decode"}
    _, output, _ = trivium_here(*move, "replica", home=home, env=env)
    assert "replica-0: prefill and decode is now replica, after" in output
    _, output, _ = trivium_here("status", home=home, env=env)
    assert "replica-0 replica ready" in " ".join(output.split())


def check_scale(home: Path, env: dict[str, str]) -> None:
    """One replica has nothing to do."""
    code, output, errors = trivium_here("scale", "--json", home=home, env=env)
    assert code == 0, errors
    scaling = json.loads(output)
    (pool,) = scaling["pools"]
    assert (pool["role"], pool["present"], pool["workers"]) == ("replica", 1, 1)
    assert scaling["backlog"]["waiting"] == 0 and scaling["backlog"]["step_ms"] > 0
    assert "replica 1 1" in " ".join(trivium_here("scale", home=home, env=env)[1].split())


def check_commands(home: Path, env: dict[str, str]) -> None:
    _, output, _ = trivium_here("status", "--json", home=home, env=env)
    members = {row["member_id"]: row for row in json.loads(output)}
    assert {row["state"] for row in members.values()} == {"ready"}
    assert set(members) == {"router-0", "replica-0", "gateway-0", "bridge-0"}

    ask = ["chat", "-m", "Why a log?", "--max-tokens", "4", "--temperature", "0"]
    code, text, errors = trivium_here(*ask, home=home, env=env)
    assert (code, bool(text.strip())) == (0, True), errors
    assert "replica: replica-0; 4 tokens in" in errors
    _, turn_json, _ = trivium_here(*ask, "--json", home=home, env=env)
    turn = json.loads(turn_json)
    assert (turn["text"], turn["decode_worker"]) == (text, "replica-0")

    tail = ["tail", "outcomes", "--from-beginning", "-n", "1", "--json"]
    _, output, _ = trivium_here(*tail, home=home, env=env)
    outcome = json.loads(output)["value"]
    assert outcome["completion_tokens"] == 4

    public_id = "chatcmpl-" + outcome["request_id"][:18]
    code, output, errors = trivium_here("explain", public_id, home=home, env=env)
    assert (code, errors) == (0, "")
    assert output.startswith(f"{outcome['request_id']}: completed in")
    for words in ("accepted", "place replica on replica-0", "dispatched decode", "4 tokens"):
        assert words in output
    code, _, errors = trivium_here("explain", "r" + "0" * 26, home=home, env=env)
    assert (code, "no such request on" in errors) == (2, True)

    check_scale(home, env)
    check_pool(home, env)
    code, repeated_text, errors = trivium_here(
        *ask, home=home, env=env
    )  # placed by old roles or new ones
    assert (code, repeated_text) == (0, text), errors


def test_up_status_chat_tail_down(kafka: LogSettings, tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text(configuration.dump(settings(kafka)))
    home, env = tmp_path / "home", {"TRIVIUM_CONFIG": str(file), **LONG_LEASES}
    up = ["up", "--replica", "1", "--detach"]  # the settings name the broker
    try:
        code, output, errors = trivium(*up, home=home, env=env)
        assert code == 0, errors
        assert "replica-0 is ready" in output
        assert home.stat().st_mode & 0o777 == 0o700
        assert (home / "stack.toml").stat().st_mode & 0o077 == 0

        with long_leases():
            check_commands(home, env)

        code, _, errors = trivium(*up, home=home, env=env)
        assert (code, "a stack runs already" in errors) == (2, True)
    finally:
        _, stopped, _ = trivium("down", home=home, env=env)
    assert stopped == "stopped\n"
    assert read_state(home) is None


class PlannedOnly(Exception):
    """Raised in place of a start."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StackPlan]:
    """The plans of stacks that a test would have started."""
    plans: list[StackPlan] = []

    def plan_only(settings: Settings, plan: StackPlan) -> None:
        plans.append(plan)
        raise PlannedOnly

    monkeypatch.setattr("infra.stack.launcher.Stack", plan_only)
    return plans


@pytest.mark.parametrize(
    ("address", "starts_broker"), [("", True), ("127.0.0.1:9092", True), ("kafka:9092", False)]
)
def test_up_starts_own_broker_unless_settings_name_one(
    address: str, starts_broker: bool, plans: list[StackPlan]
) -> None:
    with pytest.raises(PlannedOnly):
        trivium_here("up", env={"TRIVIUM_LOG_BOOTSTRAP": address} if address else {})
    assert [plan.broker for plan in plans] == [starts_broker]


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        ("", {"prefill-0": "a", "prefill-1": "a", "decode-0": "a", "replica-0": "b"}),
        ("--prefill 0 --decode 0 --replica 1", {"replica-0": "a", "replica-1": "b"}),
    ],
)
def test_up_plans_workers_of_each_model(
    flags: str, workers: dict[str, str], plans: list[StackPlan], tmp_path: Path
) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text("[[models]]\nname='a'\nprefill=2\n[[models]]\nname='b'\nreplica=1")
    with pytest.raises(PlannedOnly):
        trivium_here("up", "--config", str(file), *flags.split())
    assert plans[0].models == workers


def test_up_rejects_revision_with_several_models() -> None:
    code, _, errors = trivium_here("up", "--model", "a", "--model", "b", "--revision", "c")
    assert code == 2 and "--revision: expected with one --model" in errors
    code, _, errors = trivium_here("up", "--model", "x/a", "--model", "y/a")
    assert code == 2 and "model 2 (y/a) and model 1 (x/a) have the same name" in errors


def test_pool_move_expects_roles_or_a_model() -> None:
    for flags in ([], ["--to", "decode", "--model", "a"]):
        code, _, errors = trivium_here("pool", "move", "decode-0", *flags)
        assert code == 2 and "pool move: expected either --to or --model" in errors


async def test_stack_start_error_includes_process_output(
    kafka: LogSettings, tmp_path: Path
) -> None:
    wrong = dataclasses.replace(settings(kafka), model=ModelSettings(path=str(tmp_path / "none")))
    plan = StackPlan(prefill=0, decode=0, routers=0, gateways=1, broker=False)
    stack = Stack(wrong, plan, folder=tmp_path)
    try:
        with pytest.raises(ConfigError, match=r"(?s)gateway-0 ended with code 2.*model.path"):
            await stack.start(timeout_s=START_S)
    finally:
        await stack.stop(grace_s=5)
    assert read_state(tmp_path) is None
