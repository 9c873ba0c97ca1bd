"""One batch while it runs: the progress that is committed, and the answers since then. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from schemas.records import Answer, Batch, BatchProgress, StoredFile
from streams.openai.batches.lines import BatchLine, answer_line, unanswered_line
from streams.openai.objects.batches import CANCELLED, COMPLETED, ENDED, EXPIRED
from streams.openai.objects.log import PART_BYTES
from streams.openai.objects.table import STORED

WRITE_S = 2.0  # least time between two writes of results
# Share of a batch's age: old batches write less often, so their files have some hundred parts.
WRITE_AGE_SHARE = 0.01


@dataclass(slots=True)
class Draft:
    """A file of results: the parts on the log, and the bytes that follow."""

    file_id: str
    offsets: list[int]
    size: int
    pending: bytearray = field(default_factory=bytearray)

    def parts(self) -> list[bytes]:
        """Return the pending bytes in parts of at most `PART_BYTES`."""
        return [
            bytes(self.pending[first : first + PART_BYTES])
            for first in range(0, len(self.pending), PART_BYTES)
        ]

    def mark_written(self, offsets: Sequence[int]) -> None:
        """Count the pending bytes as written, at these offsets."""
        self.offsets += offsets
        self.size += len(self.pending)
        self.pending.clear()

    def stored_file(self, batch: Batch, name: str, partition: int, now_ms: int) -> StoredFile:
        """Build the file that callers can download."""
        expires_s = batch.output_expires_s
        return StoredFile(
            file_id=self.file_id,
            tenant=batch.tenant,
            filename=f"{batch.batch_id}_{name}.jsonl",
            purpose="batch_output",
            bytes=self.size,
            created_ms=now_ms,
            expires_ms=now_ms + 1000 * expires_s if expires_s else 0,
            state=STORED,
            partition=partition,
            parts=tuple(self.offsets),
        )


class BatchRun:
    """A batch in progress. Its successor at another gateway would continue from `committed`."""

    def __init__(self, batch: Batch, committed: BatchProgress, now_s: float) -> None:
        self.batch, self.committed = batch, committed
        self.buffered_lines: deque[BatchLine] = deque()  # lines that are read and not sent yet
        self.output = Draft(
            committed.output_file_id, list(committed.output_parts), committed.output_bytes
        )
        self.errors = Draft(
            committed.error_file_id, list(committed.error_parts), committed.error_bytes
        )
        self._answered = bytearray(committed.answered.ljust(-(-committed.total // 8), b"\0"))
        self.done_lines = sum(byte.bit_count() for byte in self._answered)
        self._counts = committed.completed, committed.failed
        self._tokens = (
            *(committed.prompt_tokens, committed.cached_tokens),
            *(committed.completion_tokens, committed.reasoning_tokens),
        )
        self._written_s = now_s
        self._sizes: dict[int, int] = {}  # by waiting line sent from here: bytes
        self.sent_before_slot = committed.sent_lines  # lines sent before it got its slot

    @property
    def has_ended(self) -> bool:
        """Return whether the batch has ended."""
        return self.committed.status in ENDED

    @property
    def waiting(self) -> int:
        """Return the number of lines that were sent and have no answer."""
        return self.committed.sent_lines - self.done_lines

    @property
    def waiting_bytes(self) -> float:
        """Estimate the bytes of these lines; each line that a predecessor sent counts as the mean
        of all."""
        mean = self.committed.sent_bytes / max(1, self.committed.sent_lines)
        return sum(self._sizes.values()) + (self.waiting - len(self._sizes)) * mean

    def mark_sent(self, committed: BatchProgress, sizes: Sequence[int]) -> None:
        """Note that more lines were sent, with the sizes of their texts in bytes."""
        self._sizes.update(enumerate(sizes, self.committed.sent_lines))
        self.committed = committed

    def is_answered(self, line: int) -> bool:
        """Return whether a line has an answer, or was given up."""
        return bool(self._answered[line // 8] >> line % 8 & 1)

    def _mark_done(self, line: int) -> None:
        self._answered[line // 8] |= 1 << line % 8
        self._sizes.pop(line, None)
        self.done_lines += 1

    def line_id(self, line: int) -> str:
        """Build the id of a line of results."""
        return f"batch_req_{self.batch.batch_id.partition('_')[2]}_{line}"

    def take_answer(self, line: int, custom_id: str, answer: Answer) -> None:
        """Add the answer to a line; a second answer to the same line changes nothing."""
        if not 0 <= line < self.committed.sent_lines or self.is_answered(line):
            return
        text, is_error = answer_line(self.line_id(line), custom_id, answer, self.batch.endpoint)
        (self.errors if is_error else self.output).pending.extend(text)
        completed, failed = self._counts
        self._counts = completed + (not is_error), failed + is_error
        prompt, cached, completion, reasoning = self._tokens
        self._tokens = (
            prompt + answer.prompt_tokens,
            cached + answer.cached_tokens,
            completion + answer.completion_tokens,
            reasoning + answer.reasoning_tokens,
        )
        self._mark_done(line)

    def give_up(self, line: int, custom_id: str, status: str) -> None:
        """Write an error for a line without an answer, and stop waiting for it."""
        self.errors.pending.extend(unanswered_line(self.line_id(line), custom_id, status))
        self._mark_done(line)

    @property
    def pending_bytes(self) -> int:
        """Count the bytes of results that are not on the log yet."""
        return len(self.output.pending) + len(self.errors.pending)

    def is_due(self, now_s: float, now_ms: int) -> bool:
        """Return whether results have to be written now."""
        age_s = (now_ms - self.committed.started_ms) / 1000
        waits = self.pending_bytes and now_s - self._written_s >= max(
            WRITE_S, WRITE_AGE_SHARE * age_s
        )
        return bool(waits) or self.pending_bytes >= PART_BYTES

    def mark_written(self, now_s: float) -> None:
        """Note when results were last written."""
        self._written_s = now_s

    def end_status(self, now_ms: int) -> str:
        """Return the status with which the batch ends now, or an empty text if it does not.

        A line that was given up, also by a predecessor, has no answer: its batch is not completed.
        """
        if sum(self._counts) == self.committed.total:
            return COMPLETED
        return early_end_status(self.batch, now_ms)

    def progress(self, answers_from: Sequence[int], now_ms: int) -> BatchProgress:
        """Return the progress that holds once all parts are written."""
        prompt, cached, completion, reasoning = self._tokens
        completed, failed = self._counts
        return replace(
            self.committed,
            completed=completed,
            failed=failed,
            answers_from=tuple(answers_from),
            answered=bytes(self._answered),
            output_parts=tuple(self.output.offsets),
            output_bytes=self.output.size,
            error_parts=tuple(self.errors.offsets),
            error_bytes=self.errors.size,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            reasoning_tokens=reasoning,
            at_ms=now_ms,
        )


def early_end_status(batch: Batch, now_ms: int) -> str:
    """Return the status with which an incomplete batch ends now; empty if it does not."""
    if batch.cancelled_ms:
        return CANCELLED
    return EXPIRED if batch.expires_ms <= now_ms else ""
