"""How large a record each topic takes (`max.message.bytes`). Operators change that while bridges
run, so it is asked again where an answer does not fit.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from schemas.errors import BrokerUnavailable
from schemas.rules.sizes import RECORD_BYTES_MAX

LOOK_S = 1.0  # between two questions about answers that are known not to fit
Ask = Callable[[], Awaitable[Mapping[str, int]]]


class TopicLimits:
    """Of the topics that a bridge writes to; a topic that nobody asked about takes what Trivium
    writes at most."""

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
        """Ask, unless that was done since this was called, or so short a time ago; what cannot be
        told now stays as it is known."""
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
