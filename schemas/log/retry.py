"""How any process outlives a log that is away: life after life, with pauses that grow in between.

A life is one membership with its clients. What is dear (engine, model, caches, indexes) belongs to
the process and is kept. Used by workers of every kind, routers and gateways; a deployment's start
asks its broker in the same way, with a bound (`retry_until`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, LeaseError, NameTaken

Result = TypeVar("Result")
log = logging.getLogger("trivium.log")
PAUSE_S, PAUSE_MAX_S = 0.25, 5.0  # before the second life, and at most
STABLE_S = 15.0  # after so long a life the pauses start anew
# What lies outside a process and passes by itself.
TRANSIENT_ERRORS = (BrokerUnavailable, LeaseError, KafkaError, OSError)


class Backoff:
    """How long to wait before the next try."""

    def __init__(self, max_s: float = PAUSE_MAX_S) -> None:
        self._next_s, self._max_s = PAUSE_S, max_s

    def after(self, tried_s: float) -> float:
        """The pause after a try that lasted so long."""
        if tried_s > STABLE_S:
            self._next_s = PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s


async def run_with_reconnect(
    member_id: str, life: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Live until a life ends by itself or `stop` is set; one that the log ended is followed by
    another. Raises what ended a life otherwise, and NameTaken.
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
            if stop.is_set():  # it could not be drained
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
    """Go on again whenever it ends or meets one of these troubles, until cancelled; `name` says in
    the process's own log what was troubled.
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
    """Ask until there is an answer; each trouble is `report`, and an empty text when it is over.

    Raises BrokerUnavailable with the last trouble when that takes longer than `within_s`.
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
    """Wait for so long, or until `stop` is set; whether it is."""
    try:
        async with asyncio.timeout(pause_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True
