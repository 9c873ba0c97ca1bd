"""One stream of tokens as the log delivers it, reduced to what is new. Pure.

Rows may be repeated, overlap, arrive before rows that precede them (the first token comes from
another producer than the rest), or belong to void attempts. A stream counts tokens and characters,
takes the new part of each row, and compares the repeated part. The hub feeds it, the writers drain
it. A higher attempt repeats tokens. So does decode, which samples prefill's first token again and
continues from its own. If other tokens are repeated, `differs_at` is set, and the stream breaks
unless it `tolerates_difference`. A stream that `restarts`, because nothing is written before its
end, instead takes the higher attempt from token 0, or decode's own token. Rows of an attempt with a
void mark wait, and count only if the attempt's end arrives after all.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from schemas.records import AnswerDelta, OutcomeKind, StreamEnd, StreamRetrieved, TokenLogprob
from schemas.rules.sizes import PROBES_MAX
from schemas.rules.tokens import pack_tokens
from streams.calls.stream.event_id import ClientPosition
from streams.calls.stream.states import TRANSITIONS, StreamEvent, StreamState

_OPEN, _VOID, _ENDING = StreamState.OPEN, StreamState.VOID, StreamState.ENDING
_LIVE = frozenset((_OPEN, _VOID, _ENDING))
EARLY_ROWS_MAX = 4_096  # further rows are dropped; the gap then ends the stream


class StreamRow(NamedTuple):
    """Consecutive tokens of one stream and their text."""

    first_seq: int
    first_char: int
    tokens: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    writer: str = ""  # a worker's id
    deltas: Sequence[AnswerDelta] = ()  # of a parsed answer, whose rows have no text


class DeliveredAnswer:
    """Token ids and texts of one answer, from its start; the stream appends to both."""

    __slots__ = ("_ids_crc", "_ids_done", "_text_crc", "ids", "texts")

    def __init__(self) -> None:
        self.ids = array("q")
        self.texts: list[str] = []
        self._ids_done = 0  # number of ids that are in `_ids_crc`
        self._ids_crc = self._text_crc = 0

    def hand_out(self, text: str) -> None:
        """Add the next drained text, and all ids so far, to the digest."""
        count = len(self.ids)
        if count != self._ids_done:
            self._ids_crc = crc32(self.ids[self._ids_done :], self._ids_crc)
            self._ids_done = count
        if text:
            self._text_crc = crc32(_bytes(text), self._text_crc)

    def prefix(self, tokens: int, chars: int) -> "DeliveredAnswer":
        """Copy the first tokens and characters, as if none were handed out."""
        prefix = DeliveredAnswer()
        prefix.ids, prefix.texts = self.ids[:tokens], ["".join(self.texts)[:chars]]
        return prefix

    def is_prefix_of(self, longer: "DeliveredAnswer") -> bool:
        """Return whether the other answer is longer and continues this one."""
        is_shorter = len(self.ids) < len(longer.ids)
        return is_shorter and longer.differs(0, self.ids, 0, "".join(self.texts)) is None

    @property
    def digest(self) -> int:
        """Return the digest of all that was handed out."""
        return self._ids_crc ^ self._text_crc

    def packed(self) -> bytes:
        """Return the token ids as little-endian int32."""
        return pack_tokens(self.ids)

    def mark_resumed(self, chars: int) -> None:
        """Add to the digest the characters that another gateway has delivered."""
        self._text_crc = crc32(_bytes("".join(self.texts)[:chars]))

    def digest_of(self, tokens: int, chars: int) -> int:
        """Return the digest of the first tokens and characters."""
        return crc32(self.ids[:tokens]) ^ crc32(_bytes("".join(self.texts)[:chars]))

    def differs(
        self, first_seq: int, token_ids: Sequence[int], first_char: int, text: str
    ) -> int | None:
        """Return the number of the first token that differs, as far as both answers reach, or None.

        If only the text differs, it is the number of the first of these tokens.
        """
        old_ids = self.ids[first_seq : first_seq + len(token_ids)]
        if old_ids != array("q", token_ids[: len(old_ids)]):
            pairs = enumerate(zip(old_ids, token_ids, strict=False), first_seq)
            return next(seq for seq, (old_id, new_id) in pairs if old_id != new_id)
        old_text = "".join(self.texts)[first_char : first_char + len(text)]
        return None if text.startswith(old_text) else first_seq


class FormerAnswer(NamedTuple):
    """An answer that was discarded, with what it had besides tokens and text."""

    delivered: DeliveredAnswer
    logprobs: list[TokenLogprob]
    deltas: list[AnswerDelta]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Stream:
    """A stream's state; `next_seq` and `next_char` are the position of a client that has read all
    of it.

    `client_position` is where a client resumes. The stream `is_catching_up`, and returns nothing
    from `drain`, until all rows before that position were read from the log again and are the same.
    """

    __slots__ = (
        "_attempt_began_at",
        "_client_position",
        "_delivered",
        "_early_rows",
        "_former",
        "_is_asked",
        "_keeps_ids",
        "_late_rows",
        "_pending_end",
        "_tolerates_difference",
        "_void_attempt",
        "restart_count",
        "attempt",
        "choice",
        "deltas",
        "differs_at",
        "end",
        "logprobs",
        "marked_attempt",
        "next_char",
        "next_seq",
        "repeated_rows",
        "request_id",
        "restarts",
        "retrieved",
        "state",
        "texts",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        choice: int = 0,
        *,
        client_position: ClientPosition | None = None,
        tolerates_difference: bool = False,
        restarts: bool = False,
        keeps_ids: bool = True,
    ) -> None:
        self.request_id = request_id
        self.choice = choice
        self.state = StreamState.OPEN
        self.attempt = 0
        self.next_seq = 0
        self.next_char = 0
        self.texts: list[str] = []  # new since the last drain; so are the next three
        self.deltas: list[AnswerDelta] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: StreamEnd | None = None  # set when the stream has ended and is complete
        # By probe: the passages that workers inserted into the answer; 0: the router's, in the
        # prompt.
        self.retrieved: dict[int, StreamRetrieved] = {}
        self.repeated_rows = 0  # rows without anything new
        self.differs_at: int | None = None  # the first token that an attempt repeated differently
        self.restart_count = 0  # how often tokens were discarded, if it restarts
        self._delivered = DeliveredAnswer()
        # The longest answer that was discarded, if the stream restarts.
        self._former: FormerAnswer | None = None
        self._tolerates_difference = tolerates_difference
        self.restarts = restarts  # also set when no client reads the call any more
        self._keeps_ids = keeps_ids  # whether the writer takes `token_ids`
        has_position = client_position and (client_position.next_seq or client_position.next_char)
        self._client_position = client_position if has_position else None
        self._attempt_began_at = 0  # tokens before this one come from lower attempts
        self._early_rows: list[StreamRow] = []
        self.marked_attempt = 0  # the highest attempt with a void mark
        self._void_attempt = 0  # this attempt and all lower ones are void
        self._is_asked = False  # whether the last void mark asks for progress
        self._late_rows: list[tuple[int, StreamRow]] = []  # of void attempts, after their mark
        self._pending_end: StreamEnd | None = None

    @property
    def has_gap(self) -> bool:
        """Return whether later rows or the end have arrived, but rows before them are missing."""
        return self.state is _ENDING or (self.state in _LIVE and bool(self._early_rows))

    @property
    def broken(self) -> bool:
        """Return whether a difference ended the stream; no more rows are taken."""
        return self.state is StreamState.BROKEN

    @property
    def is_catching_up(self) -> bool:
        """Return whether tokens that a resuming client has were not read from the log again yet."""
        return self._client_position is not None

    def push(
        self,
        attempt: int,
        first_seq: int,
        first_char: int,
        count: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        writer: str = "",
        deltas: Sequence[AnswerDelta] = (),
    ) -> int:
        """Take a row of `count` tokens; return how many tokens are new, with those of rows that
        waited for it."""
        if self.state is not _OPEN or attempt != self.attempt:  # rarely
            if self.state is _VOID and attempt <= self._void_attempt:
                if len(self._late_rows) < EARLY_ROWS_MAX:
                    row = StreamRow(
                        first_seq, first_char, count, text, token_ids, logprobs, writer, deltas
                    )
                    self._late_rows.append((attempt, row))
                return 0
            if self.state not in _LIVE or attempt < self.attempt:
                self.repeated_rows += 1
                return 0
            if attempt > self.attempt:
                self._begin_attempt(attempt, first_seq)
        if first_seq == self.next_seq and first_char == self.next_char:  # nearly always
            self.texts.append(text)
            self.next_seq = first_seq + count
            self.next_char = first_char + len(text)
            self._delivered.texts.append(text)
            self._delivered.ids.extend(token_ids)
            if self._keeps_ids:
                self.token_ids += token_ids
            if logprobs:
                self.logprobs += logprobs
            if deltas:
                self.deltas += deltas
        else:
            row = StreamRow(first_seq, first_char, count, text, token_ids, logprobs, writer, deltas)
            if first_seq > self.next_seq or first_char > self.next_char:
                if len(self._early_rows) < EARLY_ROWS_MAX:
                    self._early_rows.append(row)
                return 0
            first_seq = self.next_seq
            self._append_new_part(row)
        if self._early_rows:
            self._append_early_rows()
        if self._client_position is not None:
            self._catch_up(self._client_position)
        if self.state is _ENDING:
            self._close_if_complete()
        return self.next_seq - first_seq

    def finish(self, end: StreamEnd) -> bool:
        """Take the end of an attempt; return whether the stream is over. The end waits for missing
        rows."""
        if self.state not in _LIVE or end.attempt < self.attempt:
            self.repeated_rows += 1
            return False
        if end.attempt <= self._void_attempt and end.kind is OutcomeKind.COMPLETED:
            self._take_late_rows(end.attempt)
        if end.attempt > self.attempt:  # an attempt without rows
            self._begin_attempt(end.attempt, end.seq)
        if self._step(StreamEvent.END):
            self._pending_end = end
            self._close_if_complete()
        return self.end is not None

    def void(self, attempt: int, *, asks: bool = True) -> bool:
        """Mark an attempt as void, so that its later rows do not count. Return whether to report
        progress: `asks`, but False if the stream has a higher attempt or its end, as no attempt
        will continue it."""
        self.marked_attempt = max(attempt, self.marked_attempt)
        if attempt < self.attempt or not self._step(StreamEvent.MARK):
            return False
        self._void_attempt = max(attempt, self._void_attempt)
        self._is_asked = asks
        self._late_rows += [(self.attempt, row) for row in self._early_rows]
        self._early_rows.clear()
        former, self._former = self._former, None
        if former is not None and self._delivered.is_prefix_of(former.delivered):
            self._put_back(former)
        return asks

    @property
    def given_up(self) -> int:
        """Return the void attempt whose router asks for progress, if no higher one has begun;
        otherwise 0."""
        return self._void_attempt if self.state is _VOID and self._is_asked else 0

    def progress(self) -> tuple[bytes, int]:
        """Return all tokens so far, packed, and the number of characters."""
        return self._delivered.packed(), self.next_char

    def _take_late_rows(self, attempt: int) -> None:
        """Take the late rows of a void attempt whose end has arrived: it had ended before it became
        void."""
        self._step(StreamEvent.ANSWER)
        late_rows, self._late_rows, self._void_attempt = self._late_rows, [], 0
        for row_attempt, row in late_rows:
            if row_attempt == attempt:
                self.push(row_attempt, *row)

    def note_retrieved(self, retrieved: StreamRetrieved) -> None:
        """Keep the first notice of each probe; routers and later attempts repeat it."""
        if retrieved.probe <= PROBES_MAX:
            self.retrieved.setdefault(retrieved.probe, retrieved)

    def _step(self, event: StreamEvent) -> bool:
        """Go to the next state; return whether the table has the event for the present one."""
        following = TRANSITIONS.get((self.state, event))
        if following is not None:
            self.state = following
        return following is not None

    def _begin_attempt(self, attempt: int, first_seq: int = 0) -> None:
        self._step(StreamEvent.ATTEMPT)
        self.attempt = attempt
        self._early_rows.clear()
        self._late_rows.clear()
        self._pending_end = None
        if self.restarts and not first_seq:
            if self._former is None or len(self._former.delivered.ids) < self.next_seq:
                self._former = FormerAnswer(self._delivered, self.logprobs, self.deltas)
            self._start_over()
        self._attempt_began_at = self.next_seq

    def _start_over(self, seq: int = 0, char: int = 0) -> None:
        """Discard all from this token and character on; no client has read it."""
        self.next_seq, self.next_char, self.restart_count = seq, char, self.restart_count + 1
        self.texts = ["".join(self.texts)[:char]]
        self.token_ids, self.logprobs = self.token_ids[:seq], self.logprobs[:seq]
        self.deltas = [delta for delta in self.deltas if delta.seq <= seq]
        self.differs_at = None
        self._delivered = self._delivered.prefix(seq, char)

    def _put_back(self, former: FormerAnswer) -> None:
        """Restore the answer of an earlier attempt: the attempt that restarted has a shorter part
        of the same tokens. Readers that do not restart have the longer one, and all readers must
        report the same."""
        self._delivered, self.logprobs, self.deltas = former
        self.texts = self._delivered.texts[:]
        self.token_ids = list(self._delivered.ids) if self._keeps_ids else []
        self.next_seq, self.next_char = len(self._delivered.ids), len("".join(self.texts))

    def is_by_prefill(self, writer: str) -> bool:
        """Return whether this worker only generates the first token of the current attempt."""
        return False

    def _append_new_part(self, row: StreamRow) -> None:
        differs_at = self._delivered.differs(row.first_seq, row.token_ids, row.first_char, row.text)
        if differs_at is not None:
            if not self.restarts:
                self._note_difference(differs_at)
            elif self.is_by_prefill(row.writer):  # late: decode continues after its own first token
                self.repeated_rows += 1
                return
            else:
                self._start_over(row.first_seq, row.first_char)
        skip = self.next_seq - row.first_seq
        skip_chars = self.next_char - row.first_char
        chars = len(row.text)
        if self.broken or (skip >= row.tokens and skip_chars >= chars):
            self.repeated_rows += 1
            return
        if skip < row.tokens:
            self._delivered.ids.extend(row.token_ids[skip:])
            if self._keeps_ids:
                self.token_ids += row.token_ids[skip:]
            self.logprobs += row.logprobs[skip:]
            self.deltas += [delta for delta in row.deltas if delta.seq > self.next_seq]
            self.next_seq = row.first_seq + row.tokens
        if skip_chars < chars:
            self.texts.append(row.text[skip_chars:])
            self._delivered.texts.append(row.text[skip_chars:])
            self.next_char = row.first_char + chars

    def _note_difference(self, at: int) -> None:
        """Record that an attempt repeated another token, and break the stream unless that is
        tolerated."""
        if self.differs_at is None:
            self.differs_at = at
        if not self._tolerates_difference:
            self._step(StreamEvent.DIFFERENCE)

    def _catch_up(self, client: ClientPosition) -> None:
        """Drop what the client has, once all of it was read again; a different digest is a
        difference."""
        if self.next_seq < client.next_seq or self.next_char < client.next_char:
            return
        self._client_position = None
        if self._delivered.digest_of(client.next_seq, client.next_char) != client.digest:
            self._note_difference(0)
        self._delivered.mark_resumed(client.next_char)
        whole = "".join(self.texts)
        self.texts = [] if self.broken else [whole[client.next_char :]]
        self.token_ids = self.token_ids[client.next_seq :]
        self.logprobs = self.logprobs[client.next_seq :]
        self.deltas = [delta for delta in self.deltas if delta.seq > client.next_seq]

    def _append_early_rows(self) -> None:
        while not self.broken:
            ready = [
                row
                for row in self._early_rows
                if row.first_seq <= self.next_seq and row.first_char <= self.next_char
            ]
            if not ready:
                return
            self._early_rows = [row for row in self._early_rows if row not in ready]
            for row in ready:
                if row.first_seq <= self.next_seq and row.first_char <= self.next_char:
                    self._append_new_part(row)
                else:  # tokens were discarded meanwhile
                    self._early_rows.append(row)

    def _close_if_complete(self) -> None:
        """End the stream once all rows before its end are here; `seq` and `chars` of 0 mean any
        number."""
        end = self._pending_end
        if end is None:
            return
        whole = end.seq <= self.next_seq and end.chars <= self.next_char
        if end.kind is OutcomeKind.COMPLETED:
            if not whole:
                return
            behind = self._client_position is not None  # a client has more than the end
            if self.restarts and 0 < end.seq < self.next_seq:
                self._start_over(end.seq, end.chars)
            elif behind or 0 < end.seq < self._attempt_began_at:  # a lower attempt delivered more
                if behind:
                    self._client_position = None
                    self.texts, self.token_ids, self.logprobs, self.deltas = [], [], [], []
                self._note_difference(end.seq)
                if self.broken:
                    return
        self._step(StreamEvent.WHOLE)
        self.end = end
        self.deltas += end.deltas
        self._early_rows.clear()

    def drain(self) -> str:
        """Return the new text. Callers take `token_ids`, `logprobs` and `deltas` before."""
        texts = self.texts
        if self.is_catching_up:
            return ""
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        self._delivered.hand_out(text)
        return text

    def position(self, *, is_ended: bool = False) -> ClientPosition:
        """Return the position of a client that has read everything; call it right after a drain."""
        return ClientPosition(self.next_seq, self.next_char, is_ended, self.digest)

    def position_after(self, seq: int) -> ClientPosition:
        """Return the position of a client that has read the first tokens of a parsed answer."""
        return ClientPosition(seq, 0, is_ended=False, digest=self._delivered.digest_of(seq, 0))

    @property
    def digest(self) -> int:
        """Return the digest of all that was drained."""
        return self._delivered.digest
