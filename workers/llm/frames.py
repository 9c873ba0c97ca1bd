"""Collects tokens: one `TokenFrame` per gateway partition and engine step.

First tokens, ends and their reports are urgent: they leave at once, while the later tokens of many
streams may wait for the interval. A stream's further tokens join its row, because fewer, larger
rows cost writer, log and gateways less. A frame that would be too large leaves in parts, each after
the former is in the log. An outcome belongs to the frame that ends its stream, and a hand-over to
the frame of its tokens; they are written once that frame is in the log.
`workers/llm/active_requests.py` fills the frames, and `workers/loops.py` sends them.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import chain

from schemas.frozen import frozen
from schemas.records import (
    AnswerDelta,
    Outcome,
    Phase,
    StreamDeltas,
    StreamEnd,
    StreamLogprobs,
    StreamRetrieved,
    StreamStart,
    TokenFrame,
    TokenLogprob,
)
from schemas.rules.sizes import FRAME_BYTES_MAX
from streams.log.clients import Headers

_ROW_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _DELTA_BYTES = 64, 5, 24, 24  # at most, without texts
_CHAR_BYTES = 4
_ROW_BYTES_MAX = FRAME_BYTES_MAX // 2  # no more tokens join a row whose texts may be as large
FrameReport = tuple[Outcome | Phase, Headers]


@frozen
class OutgoingFrame:
    """A frame for one gateway partition, and the reports to write once it is in the log."""

    partition: int
    frame: TokenFrame
    reports: Sequence[FrameReport]


@dataclass(slots=True)
class _Row:
    """Consecutive tokens of a stream; `seq` and `char` count tokens and characters before them."""

    request_id: str
    attempt: int
    seq: int
    char: int
    ids: list[int]
    text: str
    logprobs: Sequence[TokenLogprob] = ()
    deltas: list[AnswerDelta] = field(default_factory=list)
    delta_bytes: int = 0  # at most

    def joins(self, attempt: int, seq: int, char: int) -> bool:
        """Return whether tokens that begin at this position continue the row."""
        return (
            self.attempt == attempt
            and self.seq + len(self.ids) == seq
            and self.char + len(self.text) == char
            and self.delta_bytes + _CHAR_BYTES * len(self.text) < _ROW_BYTES_MAX
        )

    def bytes_max(self) -> int:
        """Return an upper bound of the row's bytes in a frame."""
        chars = 2 * len(self.request_id) + len(self.text)
        parts = 0
        for token in self.logprobs:
            chars += len(token.token) + sum([len(top.token) for top in token.top])
            parts += 1 + len(token.top)
        tokens = _TOKEN_BYTES * len(self.ids) + self.delta_bytes
        return _ROW_BYTES + tokens + _CHAR_BYTES * chars + _LOGPROB_BYTES * parts


class FrameColumns:
    """The rows of one gateway partition since its last frame."""

    def __init__(self, partition: int, frames: "Frames") -> None:
        self.partition = partition
        self._frames = frames
        self._later: dict[str, _Row] = {}  # rows that may wait for the interval, by request id
        self._reset()

    def _reset(self) -> None:
        self.dirty = False
        self.urgent = False  # a stream begins or ends, or a report waits
        self._closed: list[_Row] = []  # rows that get no more tokens; they leave first
        self._first: dict[str, _Row] = {}
        self._starts: list[StreamStart] = []
        self._notices: list[StreamRetrieved] = []
        # Ends of streams, None for a phase, with the reports that follow them.
        self._endings: list[tuple[StreamEnd | None, FrameReport]] = []

    @property
    def streams(self) -> int:
        """Return the number of streams with open rows."""
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
        """Add tokens of one stream; `seq` and `char` count tokens and characters before them. With
        `later`, its first token may wait too, because the prefill worker has sent it.
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
        """Close the stream's row: the next frame takes it, and no tokens join it."""
        row = self._first.pop(request_id, None) or self._later.pop(request_id, None)
        if row is not None:
            row.logprobs = logprobs
            self._closed.append(row)

    def start(self, start: StreamStart) -> None:
        """Add the start of a stream on this worker; it leaves with the next frame."""
        self._starts.append(start)

    def add_notice(self, notice: StreamRetrieved) -> None:
        """Add a notice about inserted passages; it leaves before the answer's later tokens."""
        if not self.dirty:
            self._frames.touch(self)
        self._notices.append(notice)
        self._urge()

    def add_deltas(self, request_id: str, deltas: Sequence[AnswerDelta]) -> None:
        """Add the deltas of the tokens just added."""
        row = self._first.get(request_id) or self._later[request_id]
        row.deltas += deltas
        row.delta_bytes += _bytes_of(deltas)

    def add_logprobs(self, request_id: str, tokens: Sequence[TokenLogprob]) -> None:
        """Add log-probabilities to the row just added, and close it."""
        self._close(request_id, tokens)

    def end(self, end: StreamEnd, outcome: Outcome, headers: Headers) -> None:
        """Add the end of a stream to the next frame, and its outcome."""
        self._last(end.request_id, end, (outcome, headers))

    def report(self, phase: Phase, headers: Headers) -> None:
        """Add a phase that must not be written before the tokens so far are in the log."""
        self._last(phase.request_id, None, (phase, headers))

    def _last(self, request_id: str, end: StreamEnd | None, report: FrameReport) -> None:
        if not self.dirty:
            self._frames.touch(self)
        self._close(request_id)
        self._endings.append((end, report))
        self._urge()

    def take(self, worker_id: str, now_ms: int, *, later: bool) -> OutgoingFrame:
        """Return a frame of the collected rows; with `later`, including those that may wait.

        If they are too large for one frame, it has the first part. The rest, with the ends and
        reports, is then urgent.
        """
        rows = [*self._closed, *self._first.values()]
        if later:
            rows += self._later.values()
            self._later = {}
        fit = _fit(rows)
        rest = rows[fit:]
        fit_ends = 0 if rest else _fit_ends(rows, self._endings)
        endings, rest_endings = self._endings[:fit_ends], self._endings[fit_ends:]
        ends = [end for end, _ in endings if end is not None]
        frame = _frame(worker_id, now_ms, rows[:fit], self._starts, ends, self._notices)
        reports = [report for _, report in endings]
        batch = OutgoingFrame(partition=self.partition, frame=frame, reports=reports)
        self._reset()
        if rest or rest_endings:
            self._closed, self._endings = rest, rest_endings
            self._urge()
        self.dirty = bool(rest or rest_endings or self._later)
        return batch


def _fit(rows: Sequence[_Row]) -> int:
    """Return how many of the rows fit into one frame; at least one."""
    if len(rows) < 2:
        return len(rows)
    bytes_left = FRAME_BYTES_MAX
    for number, row in enumerate(rows):
        bytes_left -= row.bytes_max()
        if bytes_left < 0 < number:
            return number
    return len(rows)


def _fit_ends(rows: Sequence[_Row], endings: Sequence[tuple[StreamEnd | None, FrameReport]]) -> int:
    """Return how many of the ends fit into one frame with the rows; at least one."""
    delta_bytes = [0 if end is None else _bytes_of(end.deltas) for end, _ in endings]
    if not any(delta_bytes):
        return len(endings)
    bytes_left = FRAME_BYTES_MAX - sum([row.bytes_max() for row in rows])
    for number, size in enumerate(delta_bytes):
        bytes_left -= size
        if bytes_left < 0 < number:
            return number
    return len(endings)


def _bytes_of(deltas: Sequence[AnswerDelta]) -> int:
    """Return an upper bound of the bytes of deltas in a frame."""
    chars = sum([len(delta.text) + len(delta.call_id) + len(delta.name) for delta in deltas])
    return _DELTA_BYTES * len(deltas) + _CHAR_BYTES * chars


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
        deltas=[
            StreamDeltas(
                request_id=row.request_id,
                attempt=row.attempt,
                first_seq=row.seq,
                deltas=row.deltas,
            )
            for row in rows
            if row.deltas
        ],
    )


class Frames:
    """The columns of all gateway partitions."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._columns: dict[int, FrameColumns] = {}
        self._touched: list[FrameColumns] = []
        self.urgent = False  # something must leave at once

    def columns(self, partition: int) -> FrameColumns:
        """Return the columns of one gateway partition; streams keep the reference."""
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
        """Return the number of streams with tokens to send."""
        return sum(columns.streams for columns in self._touched)

    def pending(self, busy: Container[int] = ()) -> bool:
        """Return whether there is anything to send to partitions that are not in `busy`."""
        for columns in self._touched:  # called after every step; the list is mostly empty
            if columns.partition not in busy:
                return True
        return False

    def take(
        self, now_ms: int, busy: Container[int] = (), *, urgent_only: bool = False
    ) -> list[OutgoingFrame]:
        """Return a frame for each gateway partition with something to send, in the order of first
        touch. With `urgent_only`, return only what must leave at once; later tokens keep waiting.
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
        """Drop everything that was not sent; a fenced worker must not write it."""
        while self._touched:
            self.take(0)
