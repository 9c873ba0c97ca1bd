"""Makes a snapshot of a router in a forked process, so that routing continues meanwhile.

Serializing a large state takes a second and more, which is longer than a lease may be in doubt.
A fork of the process has the state as of that moment, writes it to a pipe, and ends; the router
only pays for the fork. The fork does nothing else: signals end it, and it uses no connection.
Called by `streams/agents/router.py`.
"""

import asyncio
import gc
import os
import signal

from schemas.errors import TriviumError
from streams.core.router import Router
from streams.journal.snapshot import pack_router

_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def snapshot_in_fork(router: Router) -> bytes:
    """Return the router's state at the call. Raise TriviumError if the fork fails to write it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _write_and_exit(router, write_end)
    os.close(write_end)
    return await asyncio.to_thread(_read, child, read_end)


def _write_and_exit(router: Router, write_end: int) -> None:
    """Write the snapshot to the pipe in the fork, and exit."""
    code = 1
    try:
        gc.disable()  # collected connections would close the router's ones too
        signal.set_wakeup_fd(-1)  # the descriptor belongs to the router
        for signal_number in _HEEDED:
            signal.signal(signal_number, signal.SIG_DFL)
        with os.fdopen(write_end, "wb") as out:
            out.write(pack_router(router))
        code = 0
    finally:
        os._exit(code)


def _read(child: int, read_end: int) -> bytes:
    with os.fdopen(read_end, "rb") as pipe:
        state = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise TriviumError(f"a router's state was not written down: status {status}")
    return state
