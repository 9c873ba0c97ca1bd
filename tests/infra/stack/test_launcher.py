"""What the launcher knows of its processes while the broker is away; nothing is started."""

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, KafkaTimeoutError

from infra.stack import launcher
from infra.stack.configuration import Settings
from infra.stack.fleet_watch import FleetWatch
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan, process_specs
from infra.stack.statefile import NO_BROKER, START_FILE, StackFiles
from schemas.codec import Codec
from schemas.errors import ConfigError
from schemas.fleet import LEASE_MS, FleetView
from schemas.records import Role
from schemas.settings import ModelSettings
from streams.log.cancellation import cancel_and_wait
from tests.streams.builders import T0, beat, registration
from tests.virtual_time import virtual
from tests.waits import PATIENCE_S, until


def test_launcher_distinguishes_broker_outage_from_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was ready once is not given up."""
    stack = Stack(Settings(), StackPlan(), folder=tmp_path)
    process: Any = SimpleNamespace(failed=False, stopping=False, pid=7, has_served=False)
    stack.processes["decode-0"] = process
    stack._fleet = fleet = FleetWatch(stack.settings.log)
    fleet.view.apply(registration("decode-0", Role.DECODE, pid=7), 0, T0)

    def state_at(now_ms: int) -> str:
        monkeypatch.setattr(launcher, "wall_ms", lambda: now_ms)
        return stack.state_of("decode-0")

    assert state_at(T0) == "starting" and not process.has_served
    fleet.view.apply(beat("decode-0", 1), 1, T0)
    assert state_at(T0) == "ready" and process.has_served
    fleet.last_record_ms = T0
    later_ms = T0 + LEASE_MS + 1
    assert state_at(later_ms) == "starting", "the whole stack is"
    stack.ready = True
    assert state_at(later_ms) == NO_BROKER
    fleet.last_record_ms = later_ms  # from others
    assert state_at(later_ms) == "starting"


async def test_worker_that_drains_for_another_model_gets_one_signal(tmp_path: Path) -> None:
    """A second one would end it at once. Its roles of before are not kept for its next process."""
    models = [ModelSettings(name="a"), ModelSettings(name="b"), ModelSettings(name="c")]
    stack = Stack(Settings().with_models(models), StackPlan(decode=1), folder=tmp_path)
    specs = process_specs(
        stack.plan, folder=tmp_path, config=tmp_path, engine="vllm", gateway_port=0
    )
    signals: list[int] = []
    process: Any = SimpleNamespace(
        spec=next(spec for spec in specs if spec.name == "decode-0"),
        pid=7,
        stopping=False,
        failed=False,
        changed=asyncio.Event(),
        kill=signals.append,
    )
    stack.processes["decode-0"] = process
    moves = [
        asyncio.create_task(stack.load_model("decode-0", model, role=Role.PREFILL))
        for model in ("b", "c")
    ]
    await until(lambda: process.spec.command[10] == "c")
    view = FleetView()
    view.apply(registration("decode-0", Role.DECODE, pid=7), 0, T0)
    stack._keep_roles(view)
    assert signals == [signal.SIGTERM]
    assert process.spec.command[7:11] == ("--role", "prefill", "--model", "c")
    assert stack.plan.models["decode-0"] == "c"
    await cancel_and_wait(*moves)


def test_draining_gateway_has_no_listener(tmp_path: Path) -> None:
    """No process would serve connections to it; they are refused."""
    stack = Stack(Settings(), StackPlan(gateways=2), folder=tmp_path)
    stack._listen()
    for name in stack.plan.gateway_names():
        stack.processes[name] = SimpleNamespace()  # type: ignore[assignment]
    stack._stop_listening(but=["gateway-0"])
    stack._listen()  # a worker is added meanwhile
    assert [*stack._listeners] == ["gateway-0"]
    del stack.processes["gateway-1"]
    stack._listen()
    assert [*stack._listeners] == ["gateway-0", "gateway-1"]
    stack._stop_listening()


@virtual
async def test_fleet_watch_follows_fleet_after_broker_outage() -> None:
    """It once ended with the first error."""
    fleet, codec = FleetWatch(Settings().log), Codec()
    answers: list[Any] = [KafkaConnectionError("away"), KafkaTimeoutError("away")]
    value = codec.encode(registration("decode-0", Role.DECODE))
    answers.append([SimpleNamespace(value=value, offset=0, timestamp=T0)])

    async def batch() -> Any:
        if not answers:
            await asyncio.Event().wait()
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    reader: Any = fleet._reader  # it is not connected
    reader.batch = batch
    following = asyncio.create_task(fleet.follow())
    await until(fleet.changed.is_set, seconds=600)
    assert [*fleet.view.members] == ["decode-0"]
    following.cancel()


async def test_stack_start_reports_model_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so before anything else is started."""
    unpacked = threading.Event()

    def slow(model: ModelSettings, engine: str, *, report: Callable[[str], None]) -> ModelSettings:
        report(f"the model of {engine} is unpacked")
        assert unpacked.wait(PATIENCE_S)
        raise ConfigError("no package")

    monkeypatch.setattr(launcher, "resolve_model", slow)
    stack = Stack(Settings(), StackPlan(), folder=tmp_path)
    starting = asyncio.create_task(stack.start())
    await until(lambda: stack.waits_for == "the model of vllm is unpacked")
    unpacked.set()
    with pytest.raises(ConfigError, match="no package"):
        await starting
    assert not (tmp_path / "broker").exists()
    await stack.stop()


async def test_stack_start_resolves_all_models_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved: list[str] = []
    folder = tmp_path / "adapters"

    def resolve(
        model: ModelSettings, engine: str, *, report: Callable[[str], None]
    ) -> ModelSettings:
        report("it is unpacked")
        resolved.append(stack.waits_for)
        return model

    monkeypatch.setattr(launcher, "resolve_model", resolve)
    second = ModelSettings(name="second", adapters={"law": str(folder)})
    models = Settings().with_models([ModelSettings(name="first"), second])
    stack = Stack(models, StackPlan(), folder=tmp_path)
    with pytest.raises(ConfigError, match="model.adapters.law: expected a folder"):
        await stack.start()
    assert resolved == ["model first: it is unpacked", "model second: it is unpacked"]
    await stack.stop()


async def test_fork_servers_get_resolved_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which parsers they import depends on the model's files."""
    models: list[ModelSettings] = []

    def refuse(_plan: StackPlan, settings: Settings, _folder: Path) -> None:
        models.append(settings.model)
        raise ConfigError("enough")

    monkeypatch.setattr(launcher, "fork_servers", refuse)
    plan = StackPlan(gateways=0)
    stack = Stack(Settings(model=ModelSettings(path="tiny")), plan, folder=tmp_path)
    with pytest.raises(ConfigError, match="enough"):
        await stack.start()
    await stack.stop()
    assert Path(models[0].path).is_dir() and models[0].tool_parser == "hermes"


async def test_stack_estimates_start_time_from_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is shown meanwhile; without an earlier start it is of two idle cores."""
    monkeypatch.setattr(Stack, "age_s", 71.0)
    plan = StackPlan(prefill=0, decode=0, routers=0, gateways=0)
    stack = Stack(Settings(), plan, folder=tmp_path)
    await stack.wait_ready()
    assert stack.usual_s == 71.0 and stack.ready
    assert Stack(Settings(), StackPlan(), folder=tmp_path).usual_s == launcher._USUAL_S["vllm"]


def test_unwritable_start_record_does_not_fail_start(tmp_path: Path) -> None:
    """A disk was full; here a folder is in the way, which stops root, too."""
    (tmp_path / START_FILE).mkdir()
    files = StackFiles(tmp_path)
    files.record_start("sim", 3.0)
    assert files.usual_s("sim") is None
