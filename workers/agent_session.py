"""One life of a worker whose records Faust agents take: served, drained and closed.

Called by `workers/search/service/worker.py` and `workers/embed/worker.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.log.clients import LogProducer
from schemas.log.faust.app import run_app
from schemas.log.faust.group import Group
from schemas.log.faust.watchdog import watch
from schemas.log.membership import Membership
from schemas.records import MemberState
from schemas.settings import LogSettings
from workers.tasks import Tasks, close

log = logging.getLogger("trivium.worker")


class AgentIntake(Protocol):
    """What agents hand their events to."""

    group: Group

    async def drain(self) -> None:
        """Take no more, and wait for what is under way."""


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """`serve`, `drain` where it is to end well, and `close` in any case."""

    settings: LogSettings
    membership: Membership
    producer: LogProducer
    app: Any  # of Faust
    intake: AgentIntake
    give_up: Callable[[], Awaitable[None]]  # what is under way
    drain_timeout_ms: int
    close_timeout_ms: int
    tasks: Tasks = field(default_factory=Tasks)
    is_drained: bool = False

    def serve(self, stall_ms: int) -> None:
        """Let the agents begin; lag without progress for so long ends this life."""
        group = self.intake.group
        self.tasks.spawn("watchdog", watch(self.settings, group, stall_ms))
        self.tasks.spawn("failure", group.wait_for_failure())
        self.tasks.spawn("agents", run_app(self.app))

    async def drain(self) -> None:
        """Take no more, and finish what is under way."""
        self.membership.set_state(MemberState.DRAINING)
        try:
            async with asyncio.timeout(self.drain_timeout_ms / 1000):
                await self.tasks.until(self.intake.drain())
        except TimeoutError:
            log.warning("%s: something is left after the drain", self.membership.member_id)
        self.is_drained = True

    async def close(self, **readers: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Commit and stop reading first, say goodbye last. A lost life writes nothing more."""
        await self._close("agents", self.app.stop())
        await self.give_up()
        await self.tasks.cancel()
        for what, stop in readers.items():
            await self._close(f"reader of {what}", stop())
        await self._close("membership", self.membership.leave())
        closing = self.producer.stop() if self.is_drained else self.producer.discard()
        await self._close("producer", closing)

    async def _close(self, what: str, closing: Coroutine[Any, Any, None]) -> None:
        await close(what, closing, self.close_timeout_ms)
