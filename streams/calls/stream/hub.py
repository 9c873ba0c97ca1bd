"""Delivers frames to the streams that wait for them, and wakes each call once per batch of frames.

A `Call` is one HTTP answer with its streams. The hub never awaits: the reader applies all frames
that it has, each touched call is woken once, and the call's handler writes everything new in one
piece. There is no task and no future per token.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from schemas.errors import AttemptsDiffer, DeadlineExceeded, EngineFailed, TriviumError
from schemas.records import (
    OutcomeKind,
    StreamEnd,
    StreamStart,
    TokenFrame,
    TokenLogprob,
)
from streams.calls.metrics import Metrics
from streams.calls.stream.event_id import ClientPosition, StreamKey
from streams.calls.stream.parsed import deltas_by_row
from streams.calls.stream.stream import Stream

logger = logging.getLogger(__name__)


class CallStream(Stream):
    """A stream of a call, with the time of its last growth (s) and its placement."""

    __slots__ = ("call", "difference_reported", "grew_s", "is_closed", "start")

    def __init__(
        self, call: "Call", request_id: str, choice: int, client_position: ClientPosition | None
    ) -> None:
        super().__init__(
            request_id,
            choice,
            client_position=client_position,
            tolerates_difference=call.tolerates_difference,
            restarts=call.waits_for_end,
            keeps_ids=call.key.token_ids,
        )
        self.call = call
        self.difference_reported = False
        self.grew_s = 0.0
        self.is_closed = False  # its call no longer counts it as open
        self.start: StreamStart | None = None  # of the highest attempt with a start

    def is_by_prefill(self, writer: str) -> bool:
        start = self.start
        if start is None or start.attempt != self.attempt:
            return False
        return writer == start.prefill_worker != start.decode_worker

    @property
    def has_frames(self) -> bool:
        """Return whether any frame had something for this stream."""
        return bool(self.attempt or self._void_attempt or self.retrieved or self.start is not None)


class AnswerProgress(NamedTuple):
    """A reader's progress in an answer with a void attempt; with `end`, the answer is over."""

    request_id: str
    session_id: str
    attempt: int
    tokens: bytes = b""
    chars: int = 0
    end: StreamEnd | None = None


OnVoid = Callable[[AnswerProgress], None]
DEADLINE_GRACE_MS = 2_000  # workers and routers end late requests, unless they are lost
ENDED_MAX = 10_000  # ended answers that may still get a void mark; the oldest are dropped


def _nothing() -> None:
    pass


def _ignore(_: AnswerProgress) -> None:
    """Ignore the progress of an answer."""


class Call:
    """An answer that a client waits for. Only its handler awaits `next_change`."""

    __slots__ = (
        "_is_changed",
        "_waiter",
        "abort_connection",
        "arrived_s",
        "client_gone",
        "deadline_ms",
        "echoes",
        "failed_end",
        "failure",
        "first_token_s",
        "gap_since_s",
        "keepalive_due",
        "key",
        "last_activity_s",
        "open_streams",
        "streams",
        "tolerates_difference",
        "waits_for_end",
    )

    def __init__(
        self,
        key: StreamKey,
        *,
        deadline_ms: int,
        arrived_s: float,
        waits_for_end: bool,
        tolerates_difference: bool = False,
        abort_connection: Callable[[], None] = _nothing,
    ) -> None:
        self.key = key
        self.abort_connection = abort_connection  # if its client does not read
        self.deadline_ms = deadline_ms
        self.arrived_s = arrived_s
        self.waits_for_end = waits_for_end  # nothing is written before the end, so wake only then
        self.tolerates_difference = tolerates_difference  # between attempts
        self.echoes: Sequence[str] = ()  # by choice: text of the prompt, before the answer's
        self.streams: list[CallStream] = []
        self.open_streams = 0
        self.first_token_s = 0.0
        self.last_activity_s = arrived_s  # time of the last growth or keep-alive
        self.gap_since_s = 0.0
        self.keepalive_due = False  # the handler has to write a comment
        self.client_gone = False  # the client hung up
        self.failure: TriviumError | None = None
        self.failed_end: StreamEnd | None = None  # the first end without an answer
        self._is_changed = False
        self._waiter: asyncio.Future[None] | None = None

    def add(
        self, request_id: str, choice: int, client_position: ClientPosition | None = None
    ) -> None:
        """Add a stream to this call; `client_position` is set if a client resumes it."""
        self.streams.append(CallStream(self, request_id, choice, client_position))
        self.open_streams += 1

    def wake(self) -> None:
        """Wake the handler, so that it looks for changes."""
        self._is_changed = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def next_change(self) -> None:
        """Wait until something has changed since the last return; changes while the handler was
        busy count."""
        if not self._is_changed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_changed = False

    def fail(self, error: TriviumError) -> None:
        """End the call with an error of the gateway; the first error counts."""
        if self.failure is None:
            self.failure = error
        self.wake()

    async def wait_for_end(self) -> None:
        """Wait until all streams have ended or the call has failed; the call has no client."""
        self.waits_for_end = True
        for stream in self.streams:
            stream.restarts = True
        while self.open_streams and self.failure is None and self.failed_end is None:
            await self.next_change()

    def hang_up(self) -> None:
        """Note that the client has disconnected."""
        self.client_gone = True
        self.wake()


def failure_of(call: Call, now_s: float, now_ms: int, gap_ms: int) -> TriviumError | None:
    """Return the error that ends the call, or None. Also records since when tokens are missing."""
    if now_ms > call.deadline_ms + DEADLINE_GRACE_MS:
        return DeadlineExceeded("the deadline passed and nobody ended the request")
    if not any(stream.has_gap for stream in call.streams):
        call.gap_since_s = 0.0
    elif not call.gap_since_s:
        call.gap_since_s = now_s
    elif (now_s - call.gap_since_s) * 1000 > gap_ms:
        return EngineFailed("tokens in the middle of the answer were lost")
    return None


class Hub:
    """The streams of this process that wait for frames."""

    def __init__(self, metrics: Metrics | None = None, on_void: OnVoid = _ignore) -> None:
        """Set up a hub. It calls `on_void` with the progress of each stream whose attempt became
        void: at the void mark, and again if the attempt's end counts after all."""
        self._metrics = metrics
        self.on_void = on_void
        self._streams: dict[str, CallStream] = {}
        self._calls: dict[str, Call] = {}
        self._final_progress: dict[str, AnswerProgress] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def calls(self) -> Iterator[Call]:
        """Return an iterator over all calls, the oldest first."""
        return iter(list(self._calls.values()))

    def find(self, parent_id: str) -> Call | None:
        """Return the call with this id, or None."""
        return self._calls.get(parent_id)

    def waits_on(self, partition: int) -> bool:
        """Return whether any call expects tokens from this partition."""
        return any(call.key.partition == partition for call in self._calls.values())

    def add(self, call: Call) -> None:
        """Register a call, so that its streams get their frames."""
        self._calls[call.key.parent_id] = call
        for stream in call.streams:
            if stream.end is None:
                self._streams[stream.request_id] = stream
            else:  # it ended in another hub
                self._keep_end(stream, stream.end)

    def remove(self, call: Call) -> None:
        """Remove a call; later frames for it are dropped. Another call for the same request stays:
        a bridge that resumes the prompts of a predecessor uses the predecessor's ids."""
        if self._calls.get(call.key.parent_id) is call:
            del self._calls[call.key.parent_id]
        for stream in call.streams:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def go_live(self, on_void: OnVoid) -> None:
        """Report every void mark to `on_void` from now on. Frames applied so far were already on
        the log: of their marks, only those that no later attempt has followed, and ends of void
        attempts, are reported."""
        self.on_void = on_void
        for call in self._calls.values():
            for stream in call.streams:
                if stream.given_up:
                    self._report_progress(stream, stream.given_up)
                elif stream.end is not None:
                    self._report_end(stream, stream.end)

    def apply(self, frame: TokenFrame, now_s: float) -> None:
        """Apply a frame: starts, notices of retrieval, rows, then ends and void marks."""
        logprobs = _by_stream(frame) if frame.logprobs else None
        deltas = deltas_by_row(frame) if frame.deltas else None
        streams = self._streams
        if frame.starts:
            self._note_starts(frame.starts)
        for retrieved in frame.retrieved:
            if (target := streams.get(retrieved.request_id)) is not None:
                target.note_retrieved(retrieved)
        token_ids = frame.token_ids
        at = tokens = foreign_rows = 0
        waits: dict[tuple[float, int], int] = {}  # rows by their stream's last growth and tokens
        for request_id, attempt, first_seq, first_char, count, text in zip(
            frame.request_ids,
            frame.attempts,
            frame.first_seqs,
            frame.first_chars,
            frame.token_counts,
            frame.texts,
            strict=True,
        ):
            stream = streams.get(request_id)
            if stream is None:
                foreign_rows += 1
                at += count
                continue
            call = stream.call
            new = stream.push(
                attempt,
                first_seq,
                first_char,
                count,
                text,
                token_ids[at : at + count],
                logprobs.get((request_id, attempt, first_seq), ()) if logprobs else (),
                frame.worker_id,
                deltas.get((request_id, attempt, first_seq), ()) if deltas else (),
            )
            at += count
            if new:
                tokens += new
                wait = (stream.grew_s, new)
                waits[wait] = waits.get(wait, 0) + 1
                stream.grew_s = call.last_activity_s = now_s
                if not call.first_token_s:
                    self._note_first_token(call, now_s)
            if stream.differs_at is not None:
                self._report_difference(stream)
            if stream.end is not None:
                self._close_stream(stream)
            elif not call.waits_for_end:
                call.wake()
        for end in frame.ends:
            ending = streams.get(end.request_id)
            if ending is None:
                continue
            if ending.finish(end):
                self._close_stream(ending)
            if ending.differs_at is not None:
                self._report_difference(ending)
        for void in frame.voids:
            given_up = streams.get(void.request_id)
            if given_up is not None:
                if given_up.void(void.attempt, asks=void.asks):
                    self._report_progress(given_up, void.attempt)
            elif (
                progress := self._final_progress.get(void.request_id)
            ) and progress.attempt <= void.attempt:
                self.on_void(progress)
        if self._metrics is not None:
            self._metrics.frame(tokens=tokens, foreign_rows=foreign_rows, waits=waits, now_s=now_s)

    def _report_progress(self, stream: CallStream, attempt: int) -> None:
        tokens, chars = stream.progress()
        session_id = stream.call.key.session_id
        self.on_void(AnswerProgress(stream.request_id, session_id, attempt, tokens, chars))

    def _keep_end(self, stream: CallStream, end: StreamEnd) -> None:
        """Keep the end of a stream: its router may void the attempt before it reads the end."""
        session_id = stream.call.key.session_id
        progress = AnswerProgress(stream.request_id, session_id, end.attempt, end=end)
        self._final_progress[stream.request_id] = progress
        if len(self._final_progress) > ENDED_MAX:
            del self._final_progress[next(iter(self._final_progress))]

    def _report_end(self, stream: CallStream, end: StreamEnd) -> None:
        """Report the end of a stream if its router has voided the attempt."""
        progress = self._final_progress.get(stream.request_id)
        if progress is not None and end.attempt <= stream.marked_attempt:
            self.on_void(progress)

    def _note_starts(self, starts: Sequence[StreamStart]) -> None:
        for start in starts:
            stream = self._streams.get(start.request_id)
            if stream is None:
                continue
            old_start = stream.start  # in one attempt, decode's has more fields
            fuller = (start.attempt, start.decode_worker != "")
            if old_start is None or fuller > (old_start.attempt, old_start.decode_worker != ""):
                stream.start = start

    def _report_difference(self, stream: CallStream) -> None:
        """Handle an attempt that repeated other tokens: fail the call, or let the answer's end
        report it."""
        if stream.difference_reported:
            return
        stream.difference_reported = True
        if self._metrics is not None:
            self._metrics.difference()
        what = (
            f"{stream.request_id}: attempt {stream.attempt} generates other tokens than those that "
            f"were delivered, from token {stream.differs_at} on"
        )
        logger.warning("%s", what)
        if stream.broken:
            stream.call.fail(AttemptsDiffer(f"{what}; send the request again"))

    def _note_first_token(self, call: Call, now_s: float) -> None:
        call.first_token_s = now_s
        if self._metrics is not None:
            self._metrics.first_token(call.key.model, now_s - call.arrived_s)

    def _close_stream(self, stream: CallStream) -> None:
        self._streams.pop(stream.request_id, None)
        if stream.is_closed:  # another hub has closed it
            return
        stream.is_closed = True
        call, end = stream.call, stream.end
        call.open_streams -= 1
        if end is not None:
            self._keep_end(stream, end)
            self._report_end(stream, end)
            if self._metrics is not None:
                self._metrics.answer(call.key.model, end.kind.value, stream.next_seq)
        if end is not None and end.kind is not OutcomeKind.COMPLETED:
            call.failed_end = call.failed_end or end
        if self._metrics is not None and stream.repeated_rows:
            self._metrics.repeated_rows(stream.repeated_rows)
        if not call.waits_for_end or not call.open_streams or call.failed_end is not None:
            call.wake()


def _by_stream(frame: TokenFrame) -> dict[tuple[str, int, int], tuple[TokenLogprob, ...]]:
    return {
        (entry.request_id, entry.attempt, entry.first_seq): tuple(entry.tokens)
        for entry in frame.logprobs
    }
