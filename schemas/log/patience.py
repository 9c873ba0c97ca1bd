"""How any process outlives a log that is away: life after life, with pauses that grow in between.

A life is one membership with its clients. What is dear (engine, model, caches, indexes) belongs to
the process and is kept. Used by workers of every kind, routers and gateways; a deployment's start
asks its broker in the same way, with a bound (`insist`).
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
TROUBLE = (BrokerUnavailable, LeaseError, KafkaError, OSError)


class Pauses:
    """How long to wait before the next try."""

    def __init__(self, most_s: float = PAUSE_MAX_S) -> None:
        self._next_s, self._most_s = PAUSE_S, most_s

    def after(self, tried_s: float) -> float:
        """The pause after a try that lasted so long."""
        if tried_s > STABLE_S:
            self._next_s = PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return pause_s


async def outlive(member_id: str, life: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Live until a life ends by itself or `stop` is set; one that the log ended is followed by
    another. Raises what ended a life otherwise, and NameTaken.
    """
    loop, pauses = asyncio.get_running_loop(), Pauses()
    while True:
        began_s = loop.time()
        try:
            await life()
            return
        except NameTaken:
            raise
        except TROUBLE as error:
            if stop.is_set():  # it could not be drained
                raise
            pause_s = pauses.after(loop.time() - began_s)
            why = f"{type(error).__name__}: {error}"
            log.warning("%s: %s; joins again in %g s", member_id, why, pause_s)
        if await stopped_within(stop, pause_s):
            return


async def over_every_trouble(
    go: Callable[[], Awaitable[None]],
    name: str,
    log: logging.Logger,
    *,
    troubles: tuple[type[Exception], ...] = TROUBLE,
) -> None:
    """Go on again whenever it ends or meets one of these troubles, until cancelled; `name` says in
    the process's own log what was troubled.
    """
    loop, pauses = asyncio.get_running_loop(), Pauses()
    while True:
        began_s = loop.time()
        try:
            await go()
        except troubles as error:
            log.warning("%s: %s: %s", name, type(error).__name__, error)
        await asyncio.sleep(pauses.after(loop.time() - began_s))


async def insist(
    ask: Callable[[], Awaitable[Result]], told: Callable[[str], None], within_s: float
) -> Result:
    """Ask until there is an answer; each trouble is `told`, and an empty text when it is over.

    Raises BrokerUnavailable with the last trouble when that takes longer than `within_s`.
    """
    pauses, last = Pauses(), "no answer"
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    return await ask()
                except NameTaken:
                    raise
                except TROUBLE as error:
                    last = str(error) or type(error).__name__
                told(last)
                await asyncio.sleep(pauses.after(0))
    except TimeoutError:
        raise BrokerUnavailable(f"{last} (asked for {within_s:.0f} s)") from None
    finally:
        told("")


async def stopped_within(stop: asyncio.Event, pause_s: float) -> bool:
    """Wait for so long, or until `stop` is set; whether it is."""
    try:
        async with asyncio.timeout(pause_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True
