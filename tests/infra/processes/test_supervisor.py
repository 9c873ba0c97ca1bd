"""The supervisor with small processes: start, restart, stop, logs, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.processes import supervisor, tether
from infra.processes.identity import DRAIN_MAX_S, identify
from infra.processes.supervisor import ProcessSpec, SupervisedProcess, Supervisor
from tests.waits import PATIENCE_S, until

IDLE = "import signal, sys; print('up', flush=True); signal.pause()"
POLITE = (
    "import signal; asked = {signal.SIGTERM}; signal.pthread_sigmask(signal.SIG_BLOCK, asked);"
    "print('up', flush=True); signal.sigwait(asked); print('bye')"  # asked before it waits or after
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True)\nwhile True: signal.pause()"
)
COUNTING = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True));"
    "print('up', flush=True)\nwhile True: signal.pause()"
)
PARENT = (
    "import signal, subprocess, sys; child = subprocess.Popen(['cat'], stdin=subprocess.PIPE);"
    "print(f'child {child.pid}', flush=True); signal.pause()"  # in one write
)


def test_launcher_kills_no_process_that_still_ends_itself(tmp_path: Path) -> None:
    assert spec(tmp_path, IDLE).grace_s > DRAIN_MAX_S


def spec(tmp_path: Path, code: str, *, name: str = "one", restart: bool = True) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-c", code),
        log_file=tmp_path / f"{name}.log",
        restart=restart,
    )


async def is_up(process: SupervisedProcess, lives: int = 1) -> None:
    await until(lambda: process.tail().count("up") >= lives)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)


async def test_process_tail_excludes_earlier_log(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("the stack of yesterday\n")
    process = Supervisor().start(spec(tmp_path, "print('up')", restart=False))
    await until(lambda: process.failed)
    assert process.tail().startswith("up") and "yesterday" not in process.tail()


async def test_supervisor_restarts_crashed_process_until_stop(tmp_path: Path) -> None:
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, IDLE))
    await is_up(process)
    first = process.pid
    process.kill()
    await is_up(process, lives=2)
    assert process.pid not in (0, first)
    assert (process.restarts, process.exit_code) == (1, -signal.SIGKILL)
    await keeper.stop()
    assert process.pid == 0
    assert process.restarts == 1


@pytest.mark.parametrize(
    ("exit_code", "lived_s", "backoff_s", "pause_s"),
    [
        (0, 5.0, 0.01, 0.0), (0, 0.004, 0.01, 0.006), (0, 5.0, 4.0, 4.0),
        (1, 5.0, 0.01, 0.01), (-signal.SIGKILL, 5.0, 4.0, 4.0),
    ],
)  # fmt: skip
def test_restart_pause_depends_on_exit_code_lifetime_and_backoff(
    exit_code: int, lived_s: float, backoff_s: float, pause_s: float
) -> None:
    assert supervisor.pause_s(exit_code, lived_s, backoff_s) == pytest.approx(pause_s)


async def test_supervisor_stop_lets_process_finish(tmp_path: Path) -> None:
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, POLITE))
    await is_up(process)
    await keeper.stop()
    assert process.exit_code == 0
    assert process.tail().endswith("bye")
    assert not process.failed


async def test_supervisor_stop_resumes_frozen_process(tmp_path: Path) -> None:
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, POLITE))
    await is_up(process)
    process.kill(signal.SIGSTOP)
    await keeper.stop(grace_s=PATIENCE_S)
    assert (process.exit_code, process.tail().split()[-1]) == (0, "bye")


async def test_supervisor_kills_unresponsive_process_after_grace(tmp_path: Path) -> None:
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, STUBBORN))
    await is_up(process)
    await keeper.stop(grace_s=0.1)
    assert process.exit_code == -signal.SIGKILL


async def test_second_stop_shortens_grace_without_second_signal(
    tmp_path: Path,
) -> None:
    """A worker that drains would take a second signal for an order to end at once."""
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, COUNTING))
    await is_up(process)
    draining = asyncio.create_task(process.stop())
    await until(lambda: process.tail().endswith("told"))
    await process.stop(grace_s=0.1)
    await draining
    assert process.exit_code == -signal.SIGKILL
    assert process.tail().count("told") == 1


@pytest.mark.parametrize(
    ("code", "restart", "exit_code"),
    [("raise SystemExit(2)", True, 2), ("raise SystemExit(1)", False, 1)],
)
async def test_supervisor_does_not_restart_bad_settings_or_one_shots(
    tmp_path: Path, code: str, restart: bool, exit_code: int
) -> None:
    process = Supervisor().start(spec(tmp_path, code, restart=restart))
    await until(lambda: process.failed)
    assert (process.exit_code, process.restarts) == (exit_code, 0)


async def test_process_log_names_missing_command(tmp_path: Path) -> None:
    odd = ProcessSpec(name="odd", command=("no-such-command",), log_file=tmp_path / "odd.log")
    keeper = Supervisor()
    process = keeper.start(odd)
    await until(lambda: "no-such-command: No such file" in process.tail())
    await keeper.stop()


async def test_process_children_end_with_process(tmp_path: Path) -> None:
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, PARENT))
    await until(lambda: "child" in process.tail())
    grandchild = identify(int(process.tail().split()[1]))
    assert grandchild is not None
    process.kill()
    await until(lambda: not grandchild.is_alive())
    await keeper.stop()


async def test_supervisor_stops_processes_together_or_by_name(tmp_path: Path) -> None:
    keeper = Supervisor()
    both = [keeper.start(spec(tmp_path, IDLE, name=name)) for name in ("one", "two")]
    with pytest.raises(ValueError, match="one runs already"):
        keeper.start(spec(tmp_path, IDLE))
    for process in both:
        await is_up(process)
    await keeper.stop(["one"])
    assert (both[0].pid, bool(both[1].pid)) == (0, True)
    await keeper.stop()
    assert both[1].pid == 0


def test_tethered_command_ends_with_its_starter() -> None:
    code = (
        "import os, subprocess, sys; child = subprocess.Popen([sys.executable, sys.argv[1],"
        "str(os.getpid()), 'cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE);"
        "child.stdin.write(b'x\\n'); child.stdin.flush(); child.stdout.readline();"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, tether.__file__]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    child = identify(int(process.stdout))
    assert child is None or child.wait(PATIENCE_S)


def test_tethered_command_refuses_other_parent() -> None:
    command = [sys.executable, tether.__file__, str(os.getpid() + 1), "-1", "echo", "started"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert "the launcher ended" in process.stderr


async def test_supervisor_keeps_restarting_process_that_has_served(tmp_path: Path) -> None:
    """Settings that were right stay right, so the cause lies outside."""
    keeper = Supervisor()
    process = keeper.start(spec(tmp_path, "print('up', flush=True); raise SystemExit(2)"))
    process.has_served = True
    await is_up(process, lives=3)
    assert not process.failed
    await keeper.stop()


async def test_supervisor_gives_up_unserved_process_with_bad_settings(tmp_path: Path) -> None:
    process = Supervisor().start(spec(tmp_path, "raise SystemExit(2)"))
    await until(lambda: process.failed)
    assert process.restarts == 0
