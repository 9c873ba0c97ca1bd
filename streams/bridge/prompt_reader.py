"""What a prompt of one partition asks; or what is committed at once, where it asks nothing.

Whoever begins where lives before it got nowhere reads with care: what is being read is noted in a
commit before, with how many have begun to read it. So a prompt on which bridges fall is found, and
is answered with an error after `CRASHES_MAX` of them. A life that ends for another reason takes its
own note back (`forgive`).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress

from schemas.errors import Cancelled, SystemFault, TriviumError
from schemas.log.faust.crash_notes import CRASHES_MAX, crash_error
from streams.bridge.pending_prompt import PendingPrompt
from streams.bridge.progress import CommitNote
from streams.bridge.submitter import Submitter

log = logging.getLogger(__name__)
STARTS_MAX = 2  # lives without an answer; the next one reads with care
_NONE = (-1, 0)


class PromptReader:
    """Reads the prompts of one partition; its `note` goes into every commit."""

    def __init__(self, submitter: Submitter, commit: Callable[[], Awaitable[None]]) -> None:
        self._submitter, self._commit = submitter, commit
        self.start_count = (
            0  # lives that began where this one does, with it, until it has an answer
        )
        self._fallen = _NONE  # the prompt on which lives before this one fell, and how many
        self._noted = _NONE  # the same, with what this life reads with care

    def begin(self, note: CommitNote, *, idle: bool) -> None:
        """As the last commit has it; `idle` where no prompt waits on which a life could fall."""
        self.start_count = 0 if idle else note.start_count + 1
        self._fallen = self._noted = (note.suspect_offset, note.falls)

    def note(
        self, tokens: Mapping[int, int], answered: Set[int], window_bytes: int, position: int
    ) -> CommitNote:
        """Of a commit at this position."""
        suspect_offset, falls = self._noted
        if suspect_offset < position or suspect_offset in answered:
            suspect_offset, falls = _NONE
        return CommitNote(tokens, answered, window_bytes, self.start_count, suspect_offset, falls)

    async def forgive(self, write: Callable[[list[PendingPrompt]], Awaitable[None]]) -> None:
        """The life ends by no fault of what it reads: say so, where `write` still can."""
        if self._noted != self._fallen:
            self._noted = self._fallen
            with suppress(TriviumError):
                await write([])

    async def read(self, prompt: PendingPrompt) -> None:
        """Set the prompt's question, or what to send without asking."""
        record = prompt.record
        try:
            await self._read(prompt)
            if prompt.question is None and prompt.sends is None:
                prompt.sends = [prompt.pair_io.answers.empty_answer(record)]
        except TriviumError as error:
            prompt.sends = self._submitter.error_records(prompt, error)
        except Exception as error:  # of one prompt: the others are to be answered
            log.exception("%s[%d]@%d", record.topic, record.partition, record.offset)
            fault = SystemFault(f"not read: {type(error).__name__}: {error}")
            prompt.sends = self._submitter.error_records(prompt, fault)

    async def _read(self, prompt: PendingPrompt) -> None:
        record, prompts = prompt.record, prompt.pair_io.prompts
        if self._submitter.lines.is_given_up(record):
            prompt.sends = self._submitter.error_records(
                prompt, Cancelled("its batch was given up")
            )[:1]
            return
        falls = self._fallen[1] if record.offset == self._fallen[0] else 0
        if falls >= CRASHES_MAX:
            raise crash_error(falls)
        if self.start_count <= STARTS_MAX and not falls:
            prompt.question = await prompts.question(record)
            return
        await prompts.fetch_schema(record)  # a life that ends while it waits falls on nothing
        self._noted = (record.offset, falls + 1)  # who falls now falls on this one
        await self._commit()
        prompt.question = await prompts.question(record)
        await self._submitter.check(prompt)
        if falls:
            self._fallen = _NONE
        self._noted = self._fallen
        await self._commit()
