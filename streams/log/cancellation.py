"""Ends tasks and closes clients in bounded time, even if they ignore their cancellation.

Libraries lose cancellations. aiokafka 0.14 closes by waiting for tasks of its own, which end
without an error when they are cancelled, also when the cancellation was meant for the caller.
Faust's services suppress the cancellation of a `stop` and continue. The bound of an
`asyncio.timeout` is lost with the cancellation, and later steps have none. So the work runs here in
a task of its own. The caller only waits for it, cancels it again while it runs, and abandons it in
the end.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

log = logging.getLogger("trivium.log")
RECANCEL_S = 1.0  # between two cancellations of a task
LEAVE_S = 30.0  # after this time a task is abandoned; closing a client takes less
Tasks = set[asyncio.Future[Any]]


async def cancel_and_wait(*tasks: asyncio.Future[Any], within_s: float = LEAVE_S) -> None:
    """Cancel tasks and wait until all have ended, with any result. Abandon those that do not end,
    with a warning. The caller's own cancellation is raised at the end."""
    loop = asyncio.get_running_loop()
    until_s, pending, was_cancelled = loop.time() + within_s, set(tasks), False
    while pending and loop.time() < until_s:
        for task in pending:
            task.cancel()
        pending, is_cancelled = await wait_uncancelled(
            pending, min(RECANCEL_S, until_s - loop.time())
        )
        was_cancelled |= is_cancelled
    for task in pending:
        log.warning("left behind, for it goes on although it was cancelled: %r", task)
    _retrieve_exceptions(set(tasks) - pending)
    if was_cancelled:
        raise asyncio.CancelledError


async def run_within(seconds: float, closing: Coroutine[Any, Any, object]) -> bool:
    """Run `closing`, and cancel it after `seconds`; return whether it ended in time. Raise what it
    raised. The caller's own cancellation is raised at the end."""
    task = asyncio.ensure_future(closing)
    pending, was_cancelled = await wait_uncancelled({task}, seconds)
    if pending:
        await cancel_and_wait(task, within_s=2 * RECANCEL_S)
    if was_cancelled:
        _retrieve_exceptions({task} - pending)
        raise asyncio.CancelledError
    if pending or task.cancelled():
        return False
    task.result()
    return True


async def wait_uncancelled(tasks: Tasks, seconds: float) -> tuple[Tasks, bool]:
    """Wait for tasks; return those that have not ended after `seconds`, and whether the caller was
    cancelled in the meantime."""
    loop = asyncio.get_running_loop()
    until_s, was_cancelled = loop.time() + seconds, False
    while tasks and (left_s := until_s - loop.time()) > 0:
        try:
            _, tasks = await asyncio.wait(tasks, timeout=left_s)
        except asyncio.CancelledError:
            was_cancelled = True
    return tasks, was_cancelled


def _retrieve_exceptions(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio logs exceptions that were never retrieved
