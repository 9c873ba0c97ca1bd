"""Keeps a stack's broker running: restarts it at the same address when it dies.

Called by `infra/stack/launcher.py`. Clients know one address, so another port would not do, however
long the former one is taken: for example by a client that tried to connect to it and got that port
as its own.
"""

import asyncio
import logging

from infra.broker.node import Broker
from schemas.errors import BrokerUnavailable, TriviumError
from streams.log.retry import Backoff

log = logging.getLogger("trivium.broker")
_POLL_S, _LOOK_S = 0.1, 0.5


class BrokerKeeper:
    """Call `start`, `keep` until cancelled, then `stop`; a broker that ran before is left alone."""

    def __init__(self, broker: Broker, start_timeout_s: float) -> None:
        self._broker = broker
        self._start_timeout_s = start_timeout_s
        self._is_ours = False

    async def start(self) -> str:
        """Start the broker, wait until it answers, return its address; raises BrokerUnavailable."""
        self._is_ours = not self._broker.is_running()
        bootstrap = self._broker.spawn()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while self._broker.restart_after_crash() or not self._broker.answers():  # noqa: ASYNC110 - no event
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BrokerUnavailable(
                f"the broker at {bootstrap} did not answer within {self._start_timeout_s:g} s; see "
                f"{self._broker.log_file}, or give it longer with broker.start_timeout_s"
            ) from None
        return bootstrap

    async def keep(self) -> None:
        """Restart the broker whenever it is gone, after pauses that grow while restarts fail."""
        loop, pauses = asyncio.get_running_loop(), Backoff()
        began_s = loop.time()
        while self._is_ours:
            await asyncio.sleep(_LOOK_S)
            if self._broker.is_running():
                continue
            pause_s = pauses.after(loop.time() - began_s)
            try:
                self._broker.spawn(same_port=True)
            except (TriviumError, OSError) as error:
                log.warning("the broker is not back yet: %s", error)
            began_s = loop.time()
            await asyncio.sleep(pause_s)

    def is_running(self) -> bool:
        """Return whether the broker's process is alive."""
        return self._broker.is_running()

    def stop(self) -> None:
        """Stop the broker if this keeper started it."""
        if self._is_ours:
            self._broker.stop()
