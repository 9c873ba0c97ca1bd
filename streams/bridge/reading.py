"""What a prompt of one partition asks; or what is committed at once, where it asks nothing.

Whoever begins where lives before it got nowhere reads with care: what is being read is noted in a
commit before, with how many have begun to read it. So a prompt on which bridges fall is found, and
is answered with an error after `FALLS_MAX` of them. A life that ends for another reason takes its
own note back (`forgive`).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress

from schemas.errors import Cancelled, SystemFault, TriviumError
from schemas.log.faust.falls import CRASHES_MAX, crash_error
from streams.bridge.asked import Asked
from streams.bridge.asking import Asking
from streams.bridge.progress import Note

log = logging.getLogger(__name__)
BEGUN_MAX = 2  # lives without an answer; the next one reads with care
_NONE = (-1, 0)


class Reading:
    """Of one life. A commit has its `note`."""

    def __init__(self, asking: Asking, commit: Callable[[], Awaitable[None]]) -> None:
        self._asking, self._commit = asking, commit
        self.begun = 0  # lives that began where this one does, with it, until it has an answer
        self._fallen = _NONE  # the prompt on which lives before this one fell, and how many
        self._noted = _NONE  # the same, with what this life reads with care

    def begin(self, note: Note, *, idle: bool) -> None:
        """As the last commit has it; `idle` where no prompt waits on which a life could fall."""
        self.begun = 0 if idle else note.begun + 1
        self._fallen = self._noted = (note.reading, note.falls)

    def note(
        self, tokens: Mapping[int, int], answered: Set[int], window_bytes: int, position: int
    ) -> Note:
        """Of a commit at this position."""
        reading, falls = self._noted
        if reading < position or reading in answered:
            reading, falls = _NONE
        return Note(tokens, answered, window_bytes, self.begun, reading, falls)

    async def forgive(self, write: Callable[[list[Asked]], Awaitable[None]]) -> None:
        """The life ends by no fault of what it reads: say so, where `write` still can."""
        if self._noted != self._fallen:
            self._noted = self._fallen
            with suppress(TriviumError):
                await write([])

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
        falls = self._fallen[1] if record.offset == self._fallen[0] else 0
        if falls >= CRASHES_MAX:
            raise crash_error(falls)
        if self.begun <= BEGUN_MAX and not falls:
            asked.question = await prompts.question(record)
            return
        await prompts.fetch_schema(record)  # a life that ends while it waits falls on nothing
        self._noted = (record.offset, falls + 1)  # who falls now falls on this one
        await self._commit()
        asked.question = await prompts.question(record)
        await self._asking.check(asked)
        if falls:
            self._fallen = _NONE
        self._noted = self._fallen
        await self._commit()
