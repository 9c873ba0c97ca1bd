"""One stream of tokens as the log delivers it, cut into what is new.

Pure. Rows may be repeated, overlap, arrive ahead of others (the first token comes from another
producer than the rest), or belong to attempts that were given up. A stream keeps the number of the
next token and the next character, and takes from each row only what lies beyond; what a row repeats
has to be what was taken before (`delivered.py`). The hub feeds it; the writers drain it.

Where something else is repeated, the stream breaks, or goes on behind what was delivered
(`goes_on`); both are told: `differs_at`. A higher attempt repeats, and decode, which draws
prefill's first token again and goes on behind its own. Where nothing is written before the end
(`restarts`), a higher attempt starts from the beginning, and so does decode, who has more to say.
"""

from collections.abc import Sequence
from typing import NamedTuple

from schemas.records import OutcomeKind, StreamEnd, TokenLogprob
from streams.gateway.stream.delivered import Delivered
from streams.gateway.stream.event_id import Position

ROWS_AHEAD_MAX = 4_096  # a row that finds no place is dropped; the gap then ends the stream


class Row(NamedTuple):
    """Consecutive tokens of one stream and their text."""

    first_seq: int
    first_char: int
    tokens: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]


class Stream:
    """State of one stream; `next_seq` and `next_char` are what a client that read all has.

    `has` is what a client that resumes has already: until it was seen again on the log and found
    the same, the stream is `behind` and gives nothing out.
    """

    __slots__ = (
        "_ahead",
        "_delivered",
        "_goes_on",
        "_has",
        "_keeps_ids",
        "_last_word",
        "_restarts",
        "_risen_at",
        "attempt",
        "broken",
        "choice",
        "differs_at",
        "end",
        "logprobs",
        "next_char",
        "next_seq",
        "repeats",
        "request_id",
        "texts",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        choice: int = 0,
        *,
        has: Position | None = None,
        goes_on: bool = False,
        restarts: bool = False,
        keeps_ids: bool = True,
    ) -> None:
        self.request_id = request_id
        self.choice = choice
        self.attempt = 0
        self.next_seq = 0
        self.next_char = 0
        self.texts: list[str] = []  # new since the last drain, as are the two below
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: StreamEnd | None = None  # set when the stream is over and nothing is missing
        self.repeats = 0  # rows of which nothing was new
        self.differs_at: int | None = None  # the first token that was repeated as another one
        self.broken = False  # by that; nothing is taken any more
        self._delivered = Delivered()
        self._goes_on, self._restarts = goes_on, restarts
        self._keeps_ids = keeps_ids  # somebody takes `token_ids`
        self._has = has if has is not None and (has.next_seq or has.next_char) else None
        self._risen_at = 0  # tokens before this one are of lower attempts
        self._ahead: list[Row] = []
        self._last_word: StreamEnd | None = None

    @property
    def has_gap(self) -> bool:
        """Something that comes later is here, and something before it is not."""
        return self.end is None and (bool(self._ahead) or self._last_word is not None)

    @property
    def behind(self) -> bool:
        """What a resuming client has was not all seen again yet."""
        return self._has is not None

    def push(
        self,
        attempt: int,
        first_seq: int,
        first_char: int,
        count: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
    ) -> int:
        """Take a row of `count` tokens; returns how many tokens are new, rows that waited for it
        included.
        """
        if (
            attempt == self.attempt
            and first_seq == self.next_seq
            and first_char == self.next_char
            and self.end is None
            and not self.broken
        ):  # what nearly always happens
            self.texts.append(text)
            self.next_seq = first_seq + count
            self.next_char = first_char + len(text)
            self._delivered.texts.append(text)
            self._delivered.ids.extend(token_ids)
            if self._keeps_ids:
                self.token_ids += token_ids
            if logprobs:
                self.logprobs += logprobs
        elif self.end is not None or self.broken or attempt < self.attempt:
            self.repeats += 1
            return 0
        else:
            if attempt > self.attempt:
                self._rise(attempt)
            row = Row(first_seq, first_char, count, text, token_ids, logprobs)
            if first_seq > self.next_seq or first_char > self.next_char:
                if len(self._ahead) < ROWS_AHEAD_MAX:
                    self._ahead.append(row)
                return 0
            first_seq = self.next_seq
            self._take(row)
        if self._ahead:
            self._take_ahead()
        if self._has is not None:
            self._catch_up(self._has)
        if self._last_word is not None:
            self._settle()
        return self.next_seq - first_seq

    def finish(self, end: StreamEnd) -> bool:
        """Take the last word; returns whether the stream is over, which waits for missing rows."""
        if self.end is not None or self.broken or end.attempt < self.attempt:
            self.repeats += 1
            return False
        if end.attempt > self.attempt:
            self._rise(end.attempt)
        self._last_word = end
        self._settle()
        return self.end is not None

    def _rise(self, attempt: int) -> None:
        self.attempt = attempt
        self._ahead.clear()
        self._last_word = None
        if self._restarts:
            self._begin_again()
        self._risen_at = self.next_seq

    def _begin_again(self) -> None:
        self.next_seq = self.next_char = 0
        self.texts, self.token_ids, self.logprobs = [], [], []
        self.differs_at, self._delivered = None, Delivered()

    def _take(self, row: Row) -> None:
        differs_at = self._delivered.differs(row.first_seq, row.token_ids, row.first_char, row.text)
        if differs_at is not None:
            if self._restarts and self.next_seq == 1 < row.tokens and not row.first_seq:
                self._begin_again()
            else:
                self._differ(differs_at)
        skip = self.next_seq - row.first_seq
        skip_chars = self.next_char - row.first_char
        chars = len(row.text)
        if self.broken or (skip >= row.tokens and skip_chars >= chars):
            self.repeats += 1
            return
        if skip < row.tokens:
            self._delivered.ids.extend(row.token_ids[skip:])
            if self._keeps_ids:
                self.token_ids += row.token_ids[skip:]
            self.logprobs += row.logprobs[skip:]
            self.next_seq = row.first_seq + row.tokens
        if skip_chars < chars:
            self.texts.append(row.text[skip_chars:])
            self._delivered.texts.append(row.text[skip_chars:])
            self.next_char = row.first_char + chars

    def _differ(self, at: int) -> None:
        """A token was repeated as another one."""
        if self.differs_at is None:
            self.differs_at = at
        self.broken = not self._goes_on

    def _catch_up(self, has: Position) -> None:
        """Give out what lies beyond that, if what lies before is what the client has."""
        if self.next_seq < has.next_seq or self.next_char < has.next_char:
            return
        self._has = None
        if self._delivered.digest_of(has.next_seq, has.next_char) != has.digest:
            self._differ(0)
        self._delivered.resumed(has.next_char)
        whole = "".join(self.texts)
        self.texts = [] if self.broken else [whole[has.next_char :]]
        self.token_ids = self.token_ids[has.next_seq :]
        self.logprobs = self.logprobs[has.next_seq :]

    def _take_ahead(self) -> None:
        while not self.broken:
            ready = [
                row
                for row in self._ahead
                if row.first_seq <= self.next_seq and row.first_char <= self.next_char
            ]
            if not ready:
                return
            self._ahead = [row for row in self._ahead if row not in ready]
            for row in ready:
                self._take(row)

    def _settle(self) -> None:
        """The end holds once everything before it is here; 0 and 0 mean as many as there are."""
        end = self._last_word
        if end is None:
            return
        whole = end.seq <= self.next_seq and end.chars <= self.next_char
        if end.kind is OutcomeKind.COMPLETED:
            if not whole:
                return
            if self._has is not None or 0 < end.seq < self._risen_at:  # it went on before
                if self._has is not None:
                    self._has, self.texts, self.token_ids, self.logprobs = None, [], [], []
                self._differ(end.seq)
                if self.broken:
                    return
        self.end = end
        self._ahead.clear()

    def drain(self) -> str:
        """The new text; token ids and log-probabilities are for the caller to take before."""
        texts = self.texts
        if self.behind:
            return ""
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        self._delivered.given_out(text)
        return text

    def position(self, *, ended: bool = False) -> Position:
        """What a client has that read everything; right after a drain."""
        return Position(self.next_seq, self.next_char, ended, self.digest)

    @property
    def digest(self) -> int:
        """Of everything that was drained."""
        return self._delivered.digest
