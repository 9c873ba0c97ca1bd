"""What a prompt of one partition asks; or what is committed at once, where it asks nothing.

Whoever begins where lives before it got nowhere reads with care: what is being read is noted in a
commit before. So a prompt on which bridges fall is found, and is answered with an error.
"""

import logging
from collections.abc import Awaitable, Callable

from schemas.errors import Cancelled, RecordError, SystemFault, TriviumError
from streams.bridge.asked import Asked
from streams.bridge.asking import Asking

log = logging.getLogger(__name__)
BEGUN_MAX = 2  # lives without an answer; the next one reads with care


class Reading:
    """Of one life. A commit tells `begun` and `offset`."""

    def __init__(self, asking: Asking, commit: Callable[[], Awaitable[None]]) -> None:
        self._asking, self._commit = asking, commit
        self.begun = 0  # lives that began where this one does, with it, until it has an answer
        self.offset = -1  # of the prompt that is read with care
        self._fallen_at = -1  # where the life before this one fell

    def begin(self, begun: int, fallen_at: int) -> None:
        """As the last commit has it."""
        self.begun, self._fallen_at = begun + 1, fallen_at

    async def read(self, asked: Asked) -> None:
        """Have its question, or what is to be sent without one."""
        record = asked.record
        try:
            await self._read(asked)
            if asked.question is None and asked.sends is None:
                asked.sends = [asked.ends.answers.emptied(record)]
        except TriviumError as error:
            asked.sends = self._asking.failed(asked, error)
        except Exception as error:  # of one prompt: the others are to be answered
            log.exception("%s[%d]@%d", record.topic, record.partition, record.offset)
            fault = SystemFault(f"not read: {type(error).__name__}: {error}")
            asked.sends = self._asking.failed(asked, fault)

    async def _read(self, asked: Asked) -> None:
        record, prompts = asked.record, asked.ends.prompts
        if self._asking.lines.is_given_up(record):
            asked.sends = self._asking.failed(asked, Cancelled("its batch was given up"))[:1]
            return
        if record.offset == self._fallen_at:
            raise RecordError("each bridge that read it was lost meanwhile; divide it")
        if self.begun <= BEGUN_MAX:
            asked.question = await prompts.question(record)
            return
        await self._note(record.offset)  # who falls now falls on this one
        asked.question = await prompts.question(record)
        await self._asking.check(asked)
        await self._note(-1)

    async def _note(self, offset: int) -> None:
        self.offset = offset
        await self._commit()
