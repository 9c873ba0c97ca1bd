"""The largest record of each topic (`max.message.bytes`).

Operators may change it while bridges run, so it is queried again when an answer does not fit.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from schemas.errors import BrokerUnavailable
from schemas.rules.sizes import RECORD_BYTES_MAX

LOOK_S = 1.0  # shortest interval between two queries because of answers that do not fit
Ask = Callable[[], Awaitable[Mapping[str, int]]]


class TopicLimits:
    """The limits of topics that a bridge writes to; an unknown topic has Trivium's own limit."""

    def __init__(
        self, ask: Ask | None = None, bytes_by_topic: Mapping[str, int] | None = None
    ) -> None:
        self._ask, self._bytes_by_topic = ask, dict(bytes_by_topic or {})
        self._refreshed_s = float("-inf")
        self._turn = asyncio.Lock()

    def of(self, topic: str) -> int:
        """Return the largest record of a topic in bytes, with key, headers and framing."""
        return self._bytes_by_topic.get(topic, RECORD_BYTES_MAX)

    async def refresh(self, pause_s: float = 0) -> None:
        """Query the limits, unless another task has since this call, or less than `pause_s` ago.

        If the broker is unavailable, the known limits stay.
        """
        time_s = asyncio.get_running_loop().time
        asked_s = time_s()
        async with self._turn:
            if self._ask is None or self._refreshed_s > asked_s - pause_s:
                return
            began_s = time_s()
            try:
                self._bytes_by_topic = dict(await self._ask())
            except BrokerUnavailable:
                return
            self._refreshed_s = began_s
