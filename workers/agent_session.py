"""One incarnation of a worker that reads its records with Faust agents: it serves and drains.

Called by `workers/retrieval/worker.py` and `workers/embed/worker.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from schemas.records import MemberState
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.log.faust.app import run_app
from streams.log.faust.group import Group
from streams.log.faust.watchdog import watch
from streams.log.membership import Membership
from workers.tasks import Tasks, close

log = logging.getLogger("trivium.worker")

DRAIN_MS: Final = 10_000  # for what is under way: searches and texts take less than a second


class AgentIntake(Protocol):
    """The part of a worker that processes its agents' events."""

    group: Group

    async def drain(self) -> None:
        """Accept no more events, and wait for those under way."""


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """One incarnation. Call `serve`, then `drain` unless it failed, and `close` in any case."""

    settings: LogSettings
    membership: Membership
    producer: LogProducer
    app: Any  # the Faust app
    intake: AgentIntake
    give_up: Callable[[], Awaitable[None]]  # cancels the events under way
    tasks: Tasks = field(default_factory=Tasks)
    is_drained: bool = False

    def serve(self, stall_ms: int) -> None:
        """Start the agents; lag without progress for `stall_ms` ends this incarnation."""
        group = self.intake.group
        self.tasks.spawn("watchdog", watch(self.settings, group, stall_ms))
        self.tasks.spawn("failure", group.wait_for_failure())
        self.tasks.spawn("agents", run_app(self.app))

    async def drain(self) -> None:
        """Accept no more events, and finish those under way within `DRAIN_MS`."""
        self.membership.set_state(MemberState.DRAINING)
        try:
            async with asyncio.timeout(DRAIN_MS / 1000):
                await self.tasks.until(self.intake.drain())
        except TimeoutError:
            log.warning("%s: something is left after the drain", self.membership.member_id)
        self.is_drained = True

    async def close(self, **readers: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Commit and stop reading, then leave the fleet. Unless it was drained, discard unwritten
        records."""
        await self._close("agents", self.app.stop())
        await self.give_up()
        await self.tasks.cancel()
        for what, stop in readers.items():
            await self._close(f"reader of {what}", stop())
        await self._close("membership", self.membership.leave())
        closing = self.producer.stop() if self.is_drained else self.producer.discard()
        await self._close("producer", closing)

    async def _close(self, what: str, closing: Coroutine[Any, Any, None]) -> None:
        await close(what, closing)
