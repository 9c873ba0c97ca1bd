"""The command line as people and scripts meet it; most cases spare themselves a program's start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka.errors import TopicAuthorizationFailedError

from infra.cli import app
from infra.stack.statefile import StackFiles, StackState, read_state
from schemas.errors import ConfigError
from tests.infra.cli.trivium_runner import trivium, trivium_here

COMMANDS = (
    "up down restart status scale chat pool run demo bench broker topics tail explain search "
    "ingest collections index record replay trace plan usage schemas dlq simulate evaluate version"
).split()
NOWHERE = "127.0.0.1:1"


def test_help_names_every_command() -> None:
    _, output, _ = trivium("--help")
    for command in COMMANDS:
        assert f" {command} " in output


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_help(command: str) -> None:
    code, output, _ = trivium_here(command, "--help")
    assert code == 0
    assert "Usage" in output


def test_help_reflows_paragraphs() -> None:
    _, output, _ = trivium_here("pool", "move", "--help")
    assert max(len(line.strip()) for line in output.splitlines() if "`" in line) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tail", "bogus"], "topic: expected one of requests, cancellations"),
        (
            ["run", "worker", "--role", "cook"],
            "--role: expected prefill, decode, replica, found 'cook'",
        ),
        (
            ["run", "worker", "--role", "decode,cook"],
            "--role: expected prefill, decode, replica, found",
        ),
        (["pool", "move", "w", "--to", "cook"], "--to: expected prefill, decode, replica, found"),
        (["run", "worker"], "--role: expected prefill, decode or replica, found none"),
        (["run", "cook"], "run: expected one of worker, router, gateway, bridge, retrieval, embed"),
        (["run", "bridge", "--port", "1"], "--port: expected with run gateway, found with run bri"),
        (["run", "router", "--policy", "static"], "--policy, --set: expected with --shadow"),
        (
            ["run", "worker", "--role", "decode", "--engine", "x"],
            "worker.engine: expected one of sim, vllm",
        ),
        (
            ["run", "worker", "--role", "decode", "--log-level", "loud"],
            "--log-level: expected debug",
        ),
        (["run", "gateway", "--port", "-1"], "gateway.port: expected at least 0, found -1"),
        (["topics", "describe", "--check", "--bootstrap", NOWHERE], f"no broker at {NOWHERE}"),
        (["status", "--once", "--bootstrap", NOWHERE], "start one with `trivium broker start`"),
        (["explain", "r06f2", "--bootstrap", NOWHERE], f"no broker at {NOWHERE}"),
        (["explain", "r06f2", "--since", "2"], "--since: expected a duration such as 90s, 30m"),
        (["up", "--config", "absent.toml"], "absent.toml: no such settings file"),
        (["bench", "bogus"], "bench: expected one of serving, "),
        (["plan", "ppd", "--engine", "x"], "--engine: expected sim or vllm, found 'x'"),
        (["evaluate", "ppd", "--engine", "x"], "--engine: expected sim or vllm, found 'x'"),
        (["chat", "-m", "x", "--url", f"http://{NOWHERE}"], "no gateway at"),
        (
            ["topics", "asyncapi", "-o", "/dev/null/x"],
            "/dev/null/x: not a directory; expected a path that",
        ),
        (["chat", "--json"], "--json: expected a question with -m"),
        (["chat", "-m", "x", "--url", "nonsense"], "--url: expected one such as http://"),
        (["status", "--bootstrap", "kafka"], "log.bootstrap: expected HOST:PORT, several"),
        (["status", "--bootstrap", "k:9092,k:99999"], "found 'k:9092,k:99999'"),
    ],
)
def test_cli_error_is_one_line_with_exit_code_2(arguments: list[str], message: str) -> None:
    code, _, errors = trivium_here(*arguments)
    assert code == 2
    assert message in errors
    assert errors.startswith("trivium: ")
    assert len(errors.splitlines()) == 1


def test_cli_reports_kafka_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that read the log can raise errors that only the Kafka client defines."""

    def raise_error() -> None:
        raise TopicAuthorizationFailedError("prompts")

    monkeypatch.setattr(app, "app", raise_error)
    code, _, errors = trivium_here("tail", "prompts")
    assert code == 2 and len(errors.splitlines()) == 1
    assert errors.startswith("trivium: the log: TopicAuthorizationFailedError: ")


def test_chat_finds_gateway_by_settings(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text('[gateway]\nhost = "0.0.0.0"\nport = 1\n')
    code, _, errors = trivium_here("chat", "-m", "x", "--config", str(file), home=tmp_path)
    assert (code, f"no gateway at http://{NOWHERE}: " in errors) == (2, True)


def test_debug_flag_prints_traceback() -> None:
    code, _, errors = trivium("tail", "bogus", "--debug")
    assert code == 1
    assert "Traceback" in errors


def test_topics_command_creates_verifies_and_describes(bootstrap: str) -> None:
    prefix = f"cli-{os.getpid()}."  # a broker that is given may have those of another session
    env = {"TRIVIUM_LOG_TOPIC_PREFIX": prefix, "TRIVIUM_LOG_WORKER_PARTITIONS": "2"}
    at = ["--bootstrap", bootstrap]
    code, _, errors = trivium_here("topics", "describe", "--check", *at, env=env)
    assert (code, f"missing: {prefix}requests" in errors) == (2, True)
    assert "trivium topics create" in errors

    _, output, _ = trivium_here("topics", "create", "--json", *at, env=env)
    assert f"{prefix}fleet.dlq" in json.loads(output)["created"]
    _, output, _ = trivium_here("topics", "create", "--json", *at, env=env)
    assert json.loads(output) == {"created": []}
    code, output, _ = trivium_here("topics", "describe", "--check", "--json", *at, env=env)
    assert (code, f"{prefix}fleet.dlq" in json.loads(output)["topics"]) == (0, True)
    _, output, _ = trivium_here("topics", "describe", "--json", *at, env=env)
    rows = {row["name"]: row for row in json.loads(output)}
    assert rows[f"{prefix}prefill"]["found"] == 2

    code, _, errors = trivium_here(
        "topics", "create", *at, env=env | {"TRIVIUM_LOG_WORKER_PARTITIONS": "3"}
    )
    assert code == 2
    assert f"{prefix}prefill: expected 3, found 2" in errors


def test_broker_command_starts_stops_and_resets(tmp_path: Path, bootstrap: str) -> None:
    env = {"TRIVIUM_BROKER_PORT": "0", "TRIVIUM_BROKER_HEAP_MB": "256"}
    env |= {"TRIVIUM_BROKER_QUICK": "true", "TRIVIUM_BROKER_START_TIMEOUT_S": "200"}
    code, output, _ = trivium("broker", "status", "--json", home=tmp_path, env=env)
    assert (code, json.loads(output)["running"]) == (1, False)
    try:
        code, output, errors = trivium("broker", "start", "--json", home=tmp_path, env=env)
        assert code == 0, errors
        address = json.loads(output)["bootstrap"]
        _, output, _ = trivium("broker", "start", home=tmp_path, env=env)
        assert output == f"Kafka already runs at {address}\n"
        # Other commands of this state folder find it by themselves.
        assert trivium("topics", "create", home=tmp_path, env=env)[0] == 0
        assert trivium("status", "--json", home=tmp_path, env=env) == (0, "[]\n", "")
    finally:
        _, stopped, _ = trivium("broker", "stop", "--json", home=tmp_path, env=env)
    assert json.loads(stopped) == {"stopped": True}
    code, output, _ = trivium(
        "broker", "stop", "--erase", "--yes", "--json", home=tmp_path, env=env
    )
    assert (code, json.loads(output)["empty"]) == (0, True)
    assert not (tmp_path / "broker").exists()


def test_cli_reports_unusable_state_folder() -> None:
    for command in (["up", "--engine", "sim"], ["broker", "start"]):
        code, _, errors = trivium_here(*command, home=Path("/dev/null/state"))
        assert (code, len(errors.splitlines())) == (2, 1)
        assert "/dev/null/state" in errors


def test_single_process_exits_with_code_1_on_os_error() -> None:
    """With code 2 its supervisor would give it up."""
    code = (
        "from infra.cli.operate import single_process\n"
        "async def run(stop): raise OSError(28, 'No space left on device', '/x')\n"
        "single_process._serve(run, 'info')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert (
        "ERROR trivium ended by the system" in process.stderr and "No space left" in process.stderr
    )


def test_down_reports_no_running_stack(tmp_path: Path) -> None:
    code, output, _ = trivium_here("down", home=tmp_path)
    assert (code, output) == (0, f"nothing runs in {tmp_path}\n")


def test_state_folder_lock_admits_one_stack(tmp_path: Path) -> None:
    first, second = StackFiles(tmp_path), StackFiles(tmp_path)
    first.lock()
    with pytest.raises(ConfigError, match="a stack runs already in .*trivium down"):
        second.lock()
    second.release()
    first.write(StackState(bootstrap="x:1", ready=True, gateways=["http://y"], processes=[]))
    state = read_state(tmp_path)
    assert state is not None
    assert (state.bootstrap, state.gateways, state.launcher.pid) == (
        "x:1",
        ["http://y"],
        os.getpid(),
    )
    first.release()
    assert read_state(tmp_path) is None
    second.lock()
    second.release()


def test_asyncapi_command_writes_document(tmp_path: Path) -> None:
    target = tmp_path / "asyncapi.json"
    assert trivium_here("topics", "asyncapi", "-o", str(target))[0] == 0
    assert json.loads(target.read_text())["asyncapi"].startswith("3.")


def test_version_command_lists_dependencies() -> None:
    _, output, _ = trivium_here("version", "--json")
    assert {"aiokafka", "faust-streaming", "python"} <= set(json.loads(output))
