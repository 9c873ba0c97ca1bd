"""Coalesces tokens: one `TokenFrame` per gateway partition and engine step, built column by column.

Rows are appended straight to the columns, because this runs for every token; nothing is sent here.
While a partition's last frame is not acknowledged, its next one waits and a stream's further tokens
join the row that it has: the producer would hold that frame back in any case, and under load fewer,
larger frames cost everybody less.
An outcome rides with the frame that ends its stream, and a hand-over with that of its tokens, so
that the runtime can write them once that frame is in the log. Filled by `workers/llm/held.py`,
emptied by `workers/loops.py`.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import chain

from schemas.log.clients import Headers
from schemas.records import (
    Outcome,
    Phase,
    StreamEnd,
    StreamLogprobs,
    StreamStart,
    TokenFrame,
    TokenLogprob,
)

HeldReport = tuple[Outcome | Phase, Headers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A frame for one gateway partition, and what may be reported once it is in the log."""

    partition: int
    frame: TokenFrame
    reports: Sequence[HeldReport]


class Columns:
    """The rows of one gateway partition since its last frame."""

    __slots__ = (
        "attempts",
        "dirty",
        "ends",
        "first_chars",
        "first_seqs",
        "frames",
        "ids",
        "logprobs",
        "partition",
        "reports",
        "request_ids",
        "rows",
        "starts",
        "texts",
        "token_counts",
    )

    def __init__(self, partition: int, frames: "Frames") -> None:
        self.partition = partition
        self.frames = frames
        self._reset()

    def _reset(self) -> None:
        self.dirty = False
        self.request_ids: list[str] = []
        self.attempts: list[int] = []
        self.first_seqs: list[int] = []
        self.first_chars: list[int] = []
        self.token_counts: list[int] = []
        self.ids: list[Sequence[int]] = []
        self.texts: list[str] = []
        self.rows: dict[str, int] = {}  # the row that a stream's next tokens may join
        self.logprobs: list[StreamLogprobs] = []
        self.starts: list[StreamStart] = []
        self.ends: list[StreamEnd] = []
        self.reports: list[HeldReport] = []

    def row(
        self, request_id: str, attempt: int, seq: int, char: int, ids: Sequence[int], text: str
    ) -> None:
        """Tokens of one stream; `seq` and `char` count what the answer has before them."""
        if not self.dirty:
            self.frames.touch(self)
        row = self.rows.get(request_id)
        if (
            row is not None
            and self.attempts[row] == attempt
            and self.first_seqs[row] + self.token_counts[row] == seq
            and self.first_chars[row] + len(self.texts[row]) == char
        ):
            self.ids[row] = (*self.ids[row], *ids)
            self.token_counts[row] += len(ids)
            self.texts[row] += text
            return
        if not seq:
            self.frames.urgent = True
        self.rows[request_id] = len(self.request_ids)
        self.request_ids.append(request_id)
        self.attempts.append(attempt)
        self.first_seqs.append(seq)
        self.first_chars.append(char)
        self.token_counts.append(len(ids))
        self.ids.append(ids)
        self.texts.append(text)

    def start(self, start: StreamStart) -> None:
        """A stream begins on this worker; told with its first row, or whatever leaves before."""
        self.starts.append(start)

    def add_logprobs(
        self, request_id: str, attempt: int, seq: int, tokens: Sequence[TokenLogprob]
    ) -> None:
        """Log-probabilities that belong to the row just added, which is now complete."""
        self.rows.pop(request_id, None)
        self.logprobs.append(
            StreamLogprobs(request_id=request_id, attempt=attempt, first_seq=seq, tokens=tokens)
        )

    def end(self, end: StreamEnd, outcome: Outcome, headers: Headers) -> None:
        """A stream ends with this frame."""
        if not self.dirty:
            self.frames.touch(self)
        self.ends.append(end)
        self.reports.append((outcome, headers))

    def report(self, phase: Phase, headers: Headers) -> None:
        """A phase that others must not act on before the tokens so far are in the log."""
        if not self.dirty:
            self.frames.touch(self)
        self.reports.append((phase, headers))

    def take(self, worker_id: str, now_ms: int) -> Batch:
        """The frame of what was collected; the columns start anew."""
        frame = TokenFrame(
            worker_id=worker_id,
            at_ms=now_ms,
            request_ids=self.request_ids,
            attempts=self.attempts,
            first_seqs=self.first_seqs,
            first_chars=self.first_chars,
            token_counts=self.token_counts,
            token_ids=list(chain.from_iterable(self.ids)),
            texts=self.texts,
            logprobs=self.logprobs,
            ends=self.ends,
            starts=self.starts,
        )
        batch = Batch(partition=self.partition, frame=frame, reports=self.reports)
        self._reset()
        return batch


class Frames:
    """The columns of all gateway partitions."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._columns: dict[int, Columns] = {}
        self._touched: list[Columns] = []
        self.urgent = False  # a first token is among the rows

    def columns(self, partition: int) -> Columns:
        """The columns of one gateway partition; streams keep the reference."""
        found = self._columns.get(partition)
        if found is None:
            found = self._columns[partition] = Columns(partition, self)
        return found

    def touch(self, columns: Columns) -> None:
        """Note that columns have something to send."""
        columns.dirty = True
        self._touched.append(columns)

    @property
    def streams(self) -> int:
        """How many rows wait to be sent."""
        return sum(len(columns.request_ids) for columns in self._touched)

    def pending(self, busy: Container[int] = ()) -> bool:
        """Whether there is anything to send to partitions other than these."""
        return any(columns.partition not in busy for columns in self._touched)

    def take(self, now_ms: int, busy: Container[int] = ()) -> list[Batch]:
        """One frame per gateway partition that has something, in the order of first touch."""
        touched = [columns for columns in self._touched if columns.partition not in busy]
        self._touched = [columns for columns in self._touched if columns.partition in busy]
        self.urgent = self.urgent and bool(self._touched)
        return [columns.take(self._worker_id, now_ms) for columns in touched]

    def clear(self) -> None:
        """Forget what was not sent; a fenced worker says nothing any more."""
        self.take(0)
