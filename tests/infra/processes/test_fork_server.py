"""The fork server with small programs: what a fork takes over, its children, and every end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.processes import supervisor
from infra.processes.fork_server import ForkServer
from infra.processes.supervisor import ProcessSpec, SupervisedProcess, Supervisor
from streams.gateway.http.listener import listen
from tests.infra.processes import forked_family
from tests.waits import START_S, until
from tests.workers.processes import lives, parent

FAMILY, PROGRAM = forked_family.__name__, "tests.infra.processes.forked_program"
ENVIRON = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TORCH_SETTING": "early"}
IDLE = "tests.infra.processes.forked_idler"
LISTENS = "tests.infra.processes.listening_program"
LAUNCHER = """
import asyncio, os, signal, sys
from pathlib import Path
from infra.processes.fork_server import ForkServer
from infra.processes.supervisor import ProcessSpec, Supervisor

async def main():
    forks = ForkServer("small", ["json"], dict(os.environ), Path(sys.argv[1]))
    forks.start()
    assert await forks.wait_ready(600)
    command = (sys.executable, "-m", sys.argv[2])
    spec = ProcessSpec(name="one", command=command, log_file=Path(sys.argv[1]) / "log", forks=forks)
    process = Supervisor().start(spec)
    print(forks.pid, process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def forks(tmp_path: Path) -> AsyncIterator[ForkServer]:
    server = ForkServer("small", [FAMILY], ENVIRON, tmp_path, has_children=True)
    server.start()
    assert await server.wait_ready(START_S)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)


def spec(tmp_path: Path, forks: ForkServer, *words: str, **changed: Any) -> ProcessSpec:
    return ProcessSpec(
        name="one",
        command=(sys.executable, "-m", *words),
        log_file=tmp_path / "one.log",
        forks=forks,
        **changed,
    )


async def family_reports(
    tmp_path: Path, forks: ForkServer, *variables: str
) -> list[dict[str, Any]]:
    """The reports of a program and its child, whose environment has more variables."""
    file = tmp_path / "told"
    words = (PROGRAM, str(file), *variables)
    process = Supervisor().start(spec(tmp_path, forks, *words, env=ENVIRON, restart=False))
    await until(lambda: process.failed)
    assert (process.exit_code, process.tail().splitlines()[-1]) == (3, "its child ended with 0")
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_forked_program_and_child_reuse_imports_of_server(
    tmp_path: Path, forks: ForkServer
) -> None:
    program, child = await family_reports(tmp_path, forks, "LATER=1", "VLLM_HOST_IP=10.0.0.1")
    for report in (program, child):
        assert (report["imported_by"], report["parent"]) == (forks.pid, forks.pid)
        assert (report["group"], report["folder"]) == (program["pid"], os.getcwd())
    assert "LATER" not in program["environ"] and "HOME" not in program["environ"]
    assert (child["environ"]["LATER"], child["environ"]["VLLM_HOST_IP"]) == ("1", "10.0.0.1")


async def test_child_with_other_library_environment_is_spawned(
    tmp_path: Path, forks: ForkServer
) -> None:
    program, child = await family_reports(tmp_path, forks, "TORCH_SETTING=late")
    assert (child["parent"], child["imported_by"]) == (program["pid"], child["pid"])
    assert child["environ"]["TORCH_SETTING"] == "late"


@pytest.mark.parametrize(("threads", "is_forked"), [("1", True), ("2", False)])
async def test_fork_binds_single_thread_to_gomp_core(
    tmp_path: Path, forks: ForkServer, threads: str, is_forked: bool
) -> None:
    core = max(os.sched_getaffinity(0))
    variables = (f"OMP_NUM_THREADS={threads}", f"GOMP_CPU_AFFINITY={core}")
    _, child = await family_reports(tmp_path, forks, *variables)
    assert (child["parent"] == forks.pid) == is_forked
    assert (child["cores"] == [core]) or not is_forked


async def test_forked_process_survives_server_and_restarts_by_spawn(
    tmp_path: Path, forks: ForkServer
) -> None:
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, forks, IDLE))
    await is_up(process)
    first = process.pid
    os.kill(forks.pid, signal.SIGKILL)
    await until(lambda: not lives(forks.pid))
    assert lives(first) and process.pid == first
    process.kill()
    await is_up(process, lives=2)
    assert process.pid != first
    await keeper.stop()
    assert not lives(process.pid)


@pytest.mark.parametrize("changed_variable", ["", "PYTHONPATH", "OMP_NUM_THREADS"])
async def test_program_with_other_python_environment_is_spawned(
    tmp_path: Path, forks: ForkServer, changed_variable: str
) -> None:
    keeper = Supervisor()
    environ = {**ENVIRON, "ANY": "1", **({changed_variable: "2"} if changed_variable else {})}
    process = keeper.start(spec(tmp_path, forks, IDLE, env=environ))
    await is_up(process)
    assert parent(process.pid) == (os.getpid() if changed_variable else forks.pid)
    await keeper.stop()


async def test_supervisor_asks_frozen_fork_server_once(
    tmp_path: Path, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.forks.ANSWER_S", 0.01)
    os.kill(forks.pid, signal.SIGSTOP)
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, forks, IDLE))
    await is_up(process)
    monkeypatch.setattr("workers.forks.forked_command", None)  # which nobody calls any more
    process.kill()
    await is_up(process, lives=2)
    await keeper.stop()


async def test_frozen_fork_server_does_not_become_ready(tmp_path: Path) -> None:
    server = ForkServer("small", ["json"], dict(os.environ), tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    assert not await server.wait_ready(0.01)
    server.stop()


async def test_fork_server_with_too_long_socket_path_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    server = ForkServer("small", ["json"], dict(os.environ), tmp_path)
    server.start()
    assert not await server.wait_ready(START_S)
    server.stop()
    assert not list(folder.iterdir())


async def test_supervisor_stops_process_reaped_by_fork_server(
    tmp_path: Path, forks: ForkServer
) -> None:
    """The server has reaped it: its id is free or reused."""
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, forks, IDLE))
    await is_up(process)
    os.kill(process.pid, signal.SIGKILL)
    while lives(process.pid):  # the loop, and so the supervisor, sees nothing of it
        pass
    await keeper.stop()
    assert process.exit_code == -signal.SIGKILL
    forks.stop()
    forks.stop()


@pytest.mark.parametrize("has_children", [False, True])
async def test_forked_process_leads_session_if_server_has_no_children(
    tmp_path: Path, has_children: bool
) -> None:
    server = ForkServer("small", ["json"], ENVIRON, tmp_path, has_children=has_children)
    server.start()
    assert await server.wait_ready(START_S)
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, server, IDLE, env=ENVIRON))
    await is_up(process)
    assert os.getpgid(process.pid) == process.pid
    assert (os.getsid(process.pid) == process.pid) != has_children
    await keeper.stop()
    server.stop()


@pytest.mark.parametrize("cores", ["0-1", "4096"])
async def test_child_starts_despite_unusable_core_list(
    tmp_path: Path, forks: ForkServer, cores: str
) -> None:
    _, child = await family_reports(
        tmp_path, forks, "OMP_NUM_THREADS=1", f"GOMP_CPU_AFFINITY={cores}"
    )
    assert (child["parent"] == forks.pid) == (cores == "4096")


async def test_killed_launcher_leaves_no_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), IDLE]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        await until(lambda: "up" in (tmp_path / "log").read_text())
        launcher.kill()
    await until(lambda: not any(lives(pid) for pid in pids))
    assert (tmp_path / "log").read_text() == "up\nasked to end\n"
    assert not list(tmp_path.glob("trivium-*"))


@pytest.mark.parametrize(
    ("module", "why"),
    [("no.such.module", "No module named 'no'"), (f"{IDLE}_threads", "expected no threads")],
)
async def test_fork_server_log_names_reason_for_no_fork(
    tmp_path: Path, module: str, why: str
) -> None:
    server = ForkServer("small", [module], dict(os.environ), tmp_path)
    server.start()
    assert not await server.wait_ready(START_S)
    server.stop()
    assert why in server.log_file.read_text()


async def is_up(process: SupervisedProcess, lives: int = 1) -> None:
    await until(lambda: process.tail().count("up") >= lives)


async def answered_by(listener: socket.socket) -> int:
    """The process id that the listener's process sends."""
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        return int(await reader.readline())
    finally:
        writer.close()


@pytest.mark.parametrize("is_forked", [True, False])
async def test_call_between_restarts_is_answered_by_next_process(
    tmp_path: Path, forks: ForkServer, is_forked: bool
) -> None:
    """As with systemd, whoever starts the process keeps the socket open."""
    keeper = Supervisor()
    with listen("127.0.0.1", 0) as listener:
        process_spec = spec(tmp_path, forks, LISTENS, env=ENVIRON, listener=listener)
        process = keeper.start(replace(process_spec, forks=forks if is_forked else None))
        first = await answered_by(listener)
        assert first == process.pid and (parent(first) == forks.pid) == is_forked
        process.kill()
        await until(lambda: process.pid != first)
        assert await answered_by(listener) not in (0, first)
        assert process.restarts == 1
        await keeper.stop()


async def test_listener_closes_when_process_is_given_up(tmp_path: Path, forks: ForkServer) -> None:
    listener = listen("127.0.0.1", 0)
    process = Supervisor().start(
        spec(tmp_path, forks, "no.such.module", env=ENVIRON, listener=listener, restart=False)
    )
    await until(lambda: process.failed)
    assert listener.fileno() == -1
