"""Reads the prompts of one partition: sets each one's question, or the records to commit at once.

If earlier processors started at the same position and committed no answer, this one reads with
care: before it reads a prompt, it commits which one, and how many processors have begun to read it.
So a prompt that crashes bridges is found, and after `CRASHES_MAX` crashes it is answered with an
error. A processor that ends for another reason removes its own note (`forgive`).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress

from schemas.errors import Cancelled, SystemFault, TriviumError
from streams.bridge.pending_prompt import PendingPrompt
from streams.bridge.progress import CommitNote
from streams.bridge.submitter import Submitter
from streams.log.faust.crash_notes import CRASHES_MAX, crash_error

log = logging.getLogger(__name__)
STARTS_MAX = 2  # processors without an answer; the next one reads with care
_NONE = (-1, 0)


class PromptReader:
    """Reads the prompts of one partition; its `note` goes into every commit."""

    def __init__(self, submitter: Submitter, commit: Callable[[], Awaitable[None]]) -> None:
        self._submitter, self._commit = submitter, commit
        self.start_count = (
            0  # processors, with this one, that started at this position without an answer yet
        )
        self._fallen = _NONE  # the prompt that crashed earlier processors, and their number
        self._noted = _NONE  # the same, or the prompt that this processor reads with care

    def begin(self, note: CommitNote, *, idle: bool) -> None:
        """Start from the note of the last commit; with `idle`, no prompt waits that could crash."""
        self.start_count = 0 if idle else note.start_count + 1
        self._fallen = self._noted = (note.suspect_offset, note.falls)

    def note(
        self, tokens: Mapping[int, int], answered: Set[int], window_bytes: int, position: int
    ) -> CommitNote:
        """Return the note for a commit at this position."""
        suspect_offset, falls = self._noted
        if suspect_offset < position or suspect_offset in answered:
            suspect_offset, falls = _NONE
        return CommitNote(tokens, answered, window_bytes, self.start_count, suspect_offset, falls)

    async def forgive(self, write: Callable[[list[PendingPrompt]], Awaitable[None]]) -> None:
        """Remove the note of the prompt being read, which did not crash this processor.

        `write` commits that; if it cannot, the note stays.
        """
        if self._noted != self._fallen:
            self._noted = self._fallen
            with suppress(TriviumError):
                await write([])

    async def read(self, prompt: PendingPrompt) -> None:
        """Set the prompt's question, or the records to send without a request."""
        record = prompt.record
        try:
            await self._read(prompt)
            if prompt.question is None and prompt.sends is None:
                prompt.sends = [prompt.pair_io.answers.empty_answer(record)]
        except TriviumError as error:
            prompt.sends = self._submitter.error_records(prompt, error)
        except Exception as error:  # one faulty prompt must not stop the others
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
        await prompts.fetch_schema(record)  # an end during this wait must not count as a crash
        self._noted = (record.offset, falls + 1)  # a crash from here on counts for this prompt
        await self._commit()
        prompt.question = await prompts.question(record)
        await self._submitter.check(prompt)
        if falls:
            self._fallen = _NONE
        self._noted = self._fallen
        await self._commit()
