"""Restarts processes of a running stack, one after the other, by its state file alone.

Each process gets SIGTERM, finishes its work, and is restarted by its supervisor. The next one
follows when all are ready. The module does not depend on what the processes do. A worker that gets
another model is restarted by its launcher, which takes the order from a file.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.stack.models.orders import LoadModel, write_order
from infra.stack.statefile import ProcessRow, read_state
from schemas.errors import ConfigError, NotReady
from schemas.state_folder import home

_LOOK_S = 0.2


async def restart(
    names: Sequence[str],
    *,
    folder: Path | None,
    process_timeout_s: float,
    on_restart: Callable[[str, float], None],
) -> None:
    """Restart these processes, or all; call `on_restart` with each name and its seconds away.

    Raises ConfigError for an unknown name, NotReady if a process is not ready again in time.
    """
    rows = _rows(folder)
    if unknown := sorted(set(names) - rows.keys()):
        raise ConfigError(f"expected names of {', '.join(rows)}, found {', '.join(unknown)}")
    loop = asyncio.get_running_loop()
    for name in names or tuple(rows):
        pid = (await _all_ready(folder, process_timeout_s))[name].pid
        began_s = loop.time()
        os.kill(pid, signal.SIGTERM)
        await _all_ready(folder, process_timeout_s, but=pid)
        on_restart(name, loop.time() - began_s)


async def load_model(
    worker: str, model: str, *, folder: Path | None, process_timeout_s: float
) -> str:
    """Have a worker drain and load another model; return its former one when it is ready again.

    Raises ConfigError for an unknown worker or model, NotReady if it is not ready in time.
    """
    row = _rows(folder).get(worker)
    state = read_state(folder)
    models = state.models if state is not None else []
    if row is None or not row.model:
        workers = [row.name for row in _rows(folder).values() if row.model]
        expected = ", ".join(workers) or "none, because there is one model"
        raise ConfigError(f"worker: expected one of {expected}, found {worker!r}")
    if model not in models:
        raise ConfigError(f"--model: expected one of {', '.join(models)}, found {model!r}")
    if model == row.model:
        raise ConfigError(f"--model: {worker} serves {model} already")
    write_order(folder or home(), LoadModel(worker=worker, model=model))
    loop = asyncio.get_running_loop()
    end_s = loop.time() + process_timeout_s
    while True:
        now = _rows(folder).get(worker)
        if now is not None and (now.model, now.state) == (model, "ready") and now.pid != row.pid:
            return row.model
        if loop.time() > end_s:
            where = now.state if now is not None else "gone"
            raise NotReady(f"{worker} is {where} after {process_timeout_s:g} s; its log says why")
        await asyncio.sleep(_LOOK_S)


async def _all_ready(
    folder: Path | None, each_s: float, but: int | None = None
) -> dict[str, ProcessRow]:
    """Wait until all are ready and none has the process id `but`; return them by name."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + each_s
    while True:
        rows = _rows(folder)
        late = [row.name for row in rows.values() if row.state != "ready" or row.pid == but]
        if not late:
            return rows
        if loop.time() > end_s:
            raise NotReady(f"not ready after {each_s:g} s: {', '.join(late)}")
        await asyncio.sleep(_LOOK_S)


def _rows(folder: Path | None) -> dict[str, ProcessRow]:
    state = read_state(folder)
    if state is None:
        raise NotReady(f"nothing runs in {folder or home()}; start it with `trivium up`")
    return {row.name: row for row in state.processes}
