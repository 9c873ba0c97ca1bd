"""Coalesces tokens: one `TokenFrame` per gateway partition and engine step.

What a client notices at once goes at once: first tokens, ends and the reports that ride with them
stand in front, and leave alone while the later tokens of many streams wait for the interval. A
stream's further tokens join the row that it has: under load fewer, larger rows cost everybody less.
A frame that would be too large leaves in parts, each after the one before is in the log.
An outcome rides with the frame that ends its stream, and a hand-over with that of its tokens, so
that the runtime can write them once that frame is in the log. Filled by
`workers/llm/active_requests.py`, emptied by `workers/loops.py`; nothing is sent here.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import chain

from schemas.frozen import frozen
from schemas.log.clients import Headers
from schemas.records import (
    Outcome,
    Phase,
    StreamEnd,
    StreamLogprobs,
    StreamRetrieved,
    StreamStart,
    TokenFrame,
    TokenLogprob,
)
from schemas.rules.sizes import FRAME_BYTES_MAX

_ROW_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 64, 5, 24  # beside its texts, at most
_CHAR_BYTES = 4
FrameReport = tuple[Outcome | Phase, Headers]


@frozen
class OutgoingFrame:
    """A frame for one gateway partition, and what may be reported once it is in the log."""

    partition: int
    frame: TokenFrame
    reports: Sequence[FrameReport]


@dataclass(slots=True)
class _Row:
    """Consecutive tokens of one stream; `seq` and `char` count what the answer has before them."""

    request_id: str
    attempt: int
    seq: int
    char: int
    ids: list[int]
    text: str
    logprobs: Sequence[TokenLogprob] = ()

    def joins(self, attempt: int, seq: int, char: int) -> bool:
        """Whether tokens that begin there follow on this row."""
        return (
            self.attempt == attempt
            and self.seq + len(self.ids) == seq
            and self.char + len(self.text) == char
        )

    def bytes_max(self) -> int:
        """What it takes in a frame at most."""
        chars = 2 * len(self.request_id) + len(self.text)
        parts = 0
        for token in self.logprobs:
            chars += len(token.token) + sum([len(top.token) for top in token.top])
            parts += 1 + len(token.top)
        tokens = _TOKEN_BYTES * len(self.ids)
        return _ROW_BYTES + tokens + _CHAR_BYTES * chars + _LOGPROB_BYTES * parts


class FrameColumns:
    """The rows of one gateway partition since its last frame."""

    def __init__(self, partition: int, frames: "Frames") -> None:
        self.partition = partition
        self._frames = frames
        self._later: dict[str, _Row] = {}  # tokens that may wait, by stream
        self._reset()

    def _reset(self) -> None:
        self.dirty = False
        self.urgent = False  # a stream begins or ends, or a report waits
        self._closed: list[_Row] = []  # rows that nothing joins any more; they go first
        self._first: dict[str, _Row] = {}
        self._starts: list[StreamStart] = []
        self._notices: list[StreamRetrieved] = []
        self._ends: list[StreamEnd] = []
        self._reports: list[FrameReport] = []

    @property
    def streams(self) -> int:
        """How many streams have tokens here."""
        return len(self._first) + len(self._later)

    def row(
        self,
        request_id: str,
        attempt: int,
        seq: int,
        char: int,
        ids: Sequence[int],
        text: str,
        *,
        later: bool = False,
    ) -> None:
        """Tokens of one stream; `seq` and `char` count what the answer has before them. With
        `later` also its first may wait: somebody else has sent it.
        """
        if not self.dirty:
            self._frames.touch(self)
        row = self._first.get(request_id) or self._later.get(request_id)
        if row is not None:
            if row.joins(attempt, seq, char):
                row.ids += ids
                row.text += text
                return
            self._close(request_id)
        row = _Row(request_id, attempt, seq, char, list(ids), text)
        if seq or later:
            self._later[request_id] = row
        else:
            self._first[request_id] = row
            self._urge()

    def _urge(self) -> None:
        self.urgent = self._frames.urgent = True

    def _close(self, request_id: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """The stream's row goes with the next frame, as it is."""
        row = self._first.pop(request_id, None) or self._later.pop(request_id, None)
        if row is not None:
            row.logprobs = logprobs
            self._closed.append(row)

    def start(self, start: StreamStart) -> None:
        """A stream begins on this worker; told with its first row, or whatever leaves before."""
        self._starts.append(start)

    def add_notice(self, notice: StreamRetrieved) -> None:
        """What was put into an answer; goes before its later tokens, in front of them or alone."""
        if not self.dirty:
            self._frames.touch(self)
        self._notices.append(notice)
        self._urge()

    def add_logprobs(self, request_id: str, tokens: Sequence[TokenLogprob]) -> None:
        """Log-probabilities that belong to the row just added, which is now complete."""
        self._close(request_id, tokens)

    def end(self, end: StreamEnd, outcome: Outcome, headers: Headers) -> None:
        """A stream ends with the next frame."""
        self._ends.append(end)
        self._last(end.request_id, (outcome, headers))

    def report(self, phase: Phase, headers: Headers) -> None:
        """A phase that others must not act on before the tokens so far are in the log."""
        self._last(phase.request_id, (phase, headers))

    def _last(self, request_id: str, report: FrameReport) -> None:
        if not self.dirty:
            self._frames.touch(self)
        self._close(request_id)
        self._reports.append(report)
        self._urge()

    def take(self, worker_id: str, now_ms: int, *, later: bool) -> OutgoingFrame:
        """The frame of what was collected, with or without the tokens that may wait, or a first
        part of it: what is left then, the ends among it, is urgent.
        """
        rows = [*self._closed, *self._first.values()]
        if later:
            rows += self._later.values()
            self._later = {}
        fit = _fit(rows)
        rest = rows[fit:]
        ends, reports = ([], []) if rest else (self._ends, self._reports)
        frame = _frame(worker_id, now_ms, rows[:fit], self._starts, ends, self._notices)
        batch = OutgoingFrame(partition=self.partition, frame=frame, reports=reports)
        if rest:
            self._closed, self._first, self._starts, self._notices = rest, {}, [], []
            self._urge()
        else:
            self._reset()
        self.dirty = bool(rest or self._later)
        return batch


def _fit(rows: Sequence[_Row]) -> int:
    """How many of the rows go into one frame; at least one."""
    if len(rows) < 2:
        return len(rows)
    bytes_left = FRAME_BYTES_MAX
    for number, row in enumerate(rows):
        bytes_left -= row.bytes_max()
        if bytes_left < 0 < number:
            return number
    return len(rows)


def _frame(
    worker_id: str,
    now_ms: int,
    rows: Sequence[_Row],
    starts: Sequence[StreamStart],
    ends: Sequence[StreamEnd],
    notices: Sequence[StreamRetrieved],
) -> TokenFrame:
    columns = [(row.request_id, row.attempt, row.seq, row.char, row.ids, row.text) for row in rows]
    lists = map(list, zip(*columns, strict=True)) if columns else ([],) * 6
    request_ids, attempts, seqs, chars, ids, texts = lists
    return TokenFrame(
        worker_id=worker_id,
        at_ms=now_ms,
        request_ids=request_ids,
        attempts=attempts,
        first_seqs=seqs,
        first_chars=chars,
        token_counts=list(map(len, ids)),
        token_ids=ids[0] if len(ids) == 1 else list(chain.from_iterable(ids)),
        texts=texts,
        logprobs=[
            StreamLogprobs(
                request_id=row.request_id,
                attempt=row.attempt,
                first_seq=row.seq,
                tokens=row.logprobs,
            )
            for row in rows
            if row.logprobs
        ],
        ends=ends,
        starts=starts,
        retrieved=notices,
    )


class Frames:
    """The columns of all gateway partitions."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._columns: dict[int, FrameColumns] = {}
        self._touched: list[FrameColumns] = []
        self.urgent = False  # something among it must leave at once

    def columns(self, partition: int) -> FrameColumns:
        """The columns of one gateway partition; streams keep the reference."""
        columns = self._columns.get(partition)
        if columns is None:
            columns = self._columns[partition] = FrameColumns(partition, self)
        return columns

    def touch(self, columns: FrameColumns) -> None:
        """Note that columns have something to send."""
        columns.dirty = True
        self._touched.append(columns)

    @property
    def streams(self) -> int:
        """How many streams have tokens that wait to be sent."""
        return sum(columns.streams for columns in self._touched)

    def pending(self, busy: Container[int] = ()) -> bool:
        """Whether there is anything to send to partitions other than these."""
        for columns in self._touched:  # asked after every step, and mostly of nothing
            if columns.partition not in busy:
                return True
        return False

    def take(
        self, now_ms: int, busy: Container[int] = (), *, urgent_only: bool = False
    ) -> list[OutgoingFrame]:
        """One frame per gateway partition that has something, in the order of first touch; with
        `urgent_only`, of what must leave at once, while later tokens go on waiting.
        """
        batches, rest = [], []
        for columns in self._touched:
            if columns.partition in busy or (urgent_only and not columns.urgent):
                rest.append(columns)
                continue
            batches.append(columns.take(self._worker_id, now_ms, later=not urgent_only))
            if columns.dirty:
                rest.append(columns)
        self._touched = rest
        self.urgent = any(columns.urgent for columns in rest)
        return batches

    def clear(self) -> None:
        """Forget what was not sent; a fenced worker says nothing any more."""
        while self._touched:
            self.take(0)
