"""Restarts a process's membership after the log was unreachable, with growing pauses in between.

One incarnation is one membership with its clients. Expensive state (engine, model, caches, indexes)
belongs to the process and stays. Used by workers of every kind, routers and gateways; the start of
a deployment retries its broker in the same way, with a time limit (`retry_until`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, LeaseError, NameTaken

Result = TypeVar("Result")
log = logging.getLogger("trivium.log")
PAUSE_S, PAUSE_MAX_S = 0.25, 5.0  # first pause, and longest
STABLE_S = 15.0  # an incarnation of this length resets the pauses
# Errors with causes outside the process, which pass by themselves.
TRANSIENT_ERRORS = (BrokerUnavailable, LeaseError, KafkaError, OSError)


class Backoff:
    """Computes how long to wait before the next try."""

    def __init__(self, max_s: float = PAUSE_MAX_S) -> None:
        self._next_s, self._max_s = PAUSE_S, max_s

    def after(self, tried_s: float) -> float:
        """Return the pause in s after a try that lasted `tried_s`."""
        if tried_s > STABLE_S:
            self._next_s = PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s


async def run_with_reconnect(
    member_id: str, life: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Run incarnations (`life`) until one returns or `stop` is set; start another one after a
    transient error. Raise NameTaken and all other errors.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff()
    while True:
        began_s = loop.time()
        try:
            await life()
            return
        except NameTaken:
            raise
        except TRANSIENT_ERRORS as error:
            if stop.is_set():  # draining failed
                raise
            pause_s = backoff.after(loop.time() - began_s)
            why = f"{type(error).__name__}: {error}"
            log.warning("%s: %s; joins again in %g s", member_id, why, pause_s)
        if await wait_for_stop(stop, pause_s):
            return


async def retry_forever(
    go: Callable[[], Awaitable[None]],
    name: str,
    log: logging.Logger,
    *,
    errors: tuple[type[Exception], ...] = TRANSIENT_ERRORS,
) -> None:
    """Call `go` again whenever it returns or raises one of `errors`, until cancelled.

    `log` gets the errors, under `name`.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff()
    while True:
        began_s = loop.time()
        try:
            await go()
        except errors as error:
            log.warning("%s: %s: %s", name, type(error).__name__, error)
        await asyncio.sleep(backoff.after(loop.time() - began_s))


async def retry_until(
    ask: Callable[[], Awaitable[Result]], report: Callable[[str], None], within_s: float
) -> Result:
    """Call `ask` until it returns; `report` gets each error, and an empty text when it is over.

    Raises BrokerUnavailable with the last error after `within_s`.
    """
    backoff, last = Backoff(), "no answer"
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    return await ask()
                except NameTaken:
                    raise
                except TRANSIENT_ERRORS as error:
                    last = str(error) or type(error).__name__
                report(last)
                await asyncio.sleep(backoff.after(0))
    except TimeoutError:
        raise BrokerUnavailable(f"{last} (asked for {within_s:.0f} s)") from None
    finally:
        report("")


async def wait_for_stop(stop: asyncio.Event, pause_s: float) -> bool:
    """Wait for `pause_s`, or until `stop` is set; return whether it is set."""
    try:
        async with asyncio.timeout(pause_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True
