"""Makes a snapshot of a router beside it, so that routing goes on meanwhile.

A large state takes a second and more to write down, which is longer than a lease may be in doubt.
A fork of the process has the state as of that moment, writes it to a pipe, and ends; the router
only pays for the fork. The fork does nothing else: signals end it, and no connection is used.
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
    """The router as it is at the call; raises TriviumError where that cannot be had."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _write_and_exit(router, write_end)
    os.close(write_end)
    return await asyncio.to_thread(_read, child, read_end)


def _write_and_exit(router: Router, write_end: int) -> None:
    """In the fork; never returns."""
    code = 1
    try:
        gc.disable()  # what it finds may be connections: their ends would take the router's, too
        signal.set_wakeup_fd(-1)  # it is the router's
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
