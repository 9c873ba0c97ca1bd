"""A rolling restart: one process at a time, and only when all are there."""

import signal
from pathlib import Path

import pytest

from infra.stack import rolling
from infra.stack.models.orders import LoadModel, take_orders
from infra.stack.rolling import load_model, restart
from infra.stack.statefile import ProcessRow, StackState
from schemas.errors import ConfigError, NotReady


def state(**processes: tuple[int, str]) -> StackState:
    rows = [
        ProcessRow(
            name=name, kind="worker", pid=pid, state=process_state, restarts=0, url="", log_file=""
        )
        for name, (pid, process_state) in processes.items()
    ]
    return StackState(bootstrap="", ready=True, gateways=[], processes=rows)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each read of the state file is the next moment; a process is back two moments after."""
    pids, moments = list[int](), dict[int, int]()

    def kill(pid: int, number: signal.Signals) -> None:
        assert number is signal.SIGTERM
        pids.append(pid)
        moments[pid] = 0

    def read(folder: Path | None) -> StackState:
        rows = {}
        for name, pid in (("a", 1), ("b", 2)):
            if pid in moments:
                moments[pid] += 1
            since = moments.get(pid, -1)
            rows[name] = {-1: (pid, "ready"), 1: (pid, "ready"), 2: (0, "restarting"),
                          3: (10 + pid, "starting")}.get(since, (10 + pid, "ready"))  # fmt: skip
        return state(**rows)

    monkeypatch.setattr(rolling, "_LOOK_S", 0.0)
    monkeypatch.setattr(rolling, "read_state", read)
    monkeypatch.setattr(rolling.os, "kill", kill)  # type: ignore[attr-defined]  # its own import
    return pids


@pytest.mark.parametrize(("names", "pids"), [((), [1, 2]), (("b",), [2]), (("b", "a"), [2, 1])])
async def test_rolling_restart_waits_for_each_process(
    killed: list[int], names: tuple[str, ...], pids: list[int]
) -> None:
    restarted_names: list[str] = []
    await restart(
        names,
        folder=None,
        process_timeout_s=5,
        on_restart=lambda name, seconds: restarted_names.append(name),
    )
    assert killed == pids and restarted_names == list(names or ("a", "b"))


async def test_rolling_restart_rejects_unknown_or_unready_processes(
    killed: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="expected names of a, b, found c"):
        await restart(("a", "c"), folder=None, process_timeout_s=5, on_restart=lambda *_: None)
    assert killed == []
    monkeypatch.setattr(rolling, "read_state", lambda folder: state(a=(1, "starting")))
    with pytest.raises(NotReady, match="not ready after 0 s: a"):
        await restart((), folder=None, process_timeout_s=0, on_restart=lambda *_: None)
    monkeypatch.setattr(rolling, "read_state", lambda folder: None)
    with pytest.raises(NotReady, match="nothing runs in"):
        await restart((), folder=tmp_path, process_timeout_s=0, on_restart=lambda *_: None)


def served(*rows: tuple[str, str, int, str], models: tuple[str, ...] = ("a", "b")) -> StackState:
    """A state of workers: name, model, pid and state of each."""
    processes = [
        ProcessRow(
            name=name, kind="worker", model=model, pid=pid, state=process_state, restarts=0, url="",
            log_file="",
        )
        for name, model, pid, process_state in rows
    ]  # fmt: skip
    return StackState(
        bootstrap="", ready=True, gateways=[], processes=processes, models=list(models)
    )


async def test_worker_loads_other_model_by_order_to_its_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher has taken the order at the third look."""
    moments = iter(
        [("a", 1, "ready")] * 3
        + [("b", 1, "ready"), ("b", 0, "restarting"), ("b", 2, "starting"), ("b", 2, "ready")]
    )
    monkeypatch.setattr(rolling, "_LOOK_S", 0.0)
    monkeypatch.setattr(rolling, "read_state", lambda folder: served(("w", *next(moments))))
    assert await load_model("w", "b", folder=tmp_path, process_timeout_s=600) == "a"
    assert next(moments, None) is None
    assert list(take_orders(tmp_path)) == [LoadModel(worker="w", model="b")]


@pytest.mark.parametrize(
    ("worker", "model", "models", "message"),
    [
        ("x", "b", "a", "worker: expected one of w, found 'x'"),
        ("router-0", "b", "a", "worker: expected one of w, found 'router-0'"),
        ("w", "c", "a", "--model: expected one of a, b, found 'c'"),
        ("w", "a", "a", "--model: w serves a already"),
        ("w", "b", "", "worker: expected one of none, because there is one model, found 'w'"),
    ],
)
async def test_wrong_order_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    worker: str,
    model: str,
    models: str,
    message: str,
) -> None:
    rows = served(("router-0", "", 7, "ready"), ("w", models, 1, "ready"))
    monkeypatch.setattr(rolling, "read_state", lambda folder: rows)
    with pytest.raises(ConfigError, match=message):
        await load_model(worker, model, folder=tmp_path, process_timeout_s=600)
    assert list(take_orders(tmp_path)) == []


async def test_order_that_nobody_follows_ends_with_state_of_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rolling, "read_state", lambda folder: served(("w", "a", 1, "draining")))
    with pytest.raises(NotReady, match="w is draining after 0 s; its log says why"):
        await load_model("w", "b", folder=tmp_path, process_timeout_s=0)
