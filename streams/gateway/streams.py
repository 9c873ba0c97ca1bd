"""One stream of tokens as the log delivers it, cut into what is new.

Pure. Rows may be repeated, overlap, arrive ahead of others (the first token comes from another
producer than the rest), or belong to attempts that were given up. A stream keeps the number of the
next token and the next character, and takes from each row only what lies beyond. The hub feeds it;
the writers drain it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from schemas.records import OutcomeKind, StreamEnd, TokenLogprob

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
    """State of one stream; `next_seq` and `next_char` are what a client that read all has."""

    __slots__ = (
        "_ahead",
        "_last_word",
        "attempt",
        "choice",
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
        self, request_id: str, choice: int = 0, *, next_seq: int = 0, next_char: int = 0
    ) -> None:
        self.request_id = request_id
        self.choice = choice
        self.attempt = 0
        self.next_seq = next_seq
        self.next_char = next_char
        self.texts: list[str] = []  # new since the last drain, as are the two below
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: StreamEnd | None = None  # set when the stream is over and nothing is missing
        self.repeats = 0  # rows of which nothing was new
        self._ahead: list[Row] = []
        self._last_word: StreamEnd | None = None

    @property
    def has_gap(self) -> bool:
        """Something that comes later is here, and something before it is not."""
        return self.end is None and (bool(self._ahead) or self._last_word is not None)

    def push(
        self,
        attempt: int,
        first_seq: int,
        first_char: int,
        count: int,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
    ) -> int:
        """Take a row of `count` tokens; returns how many tokens are new, rows that waited for it
        included. `token_ids` may be left out where nobody reads them.
        """
        if (
            attempt == self.attempt
            and first_seq == self.next_seq
            and first_char == self.next_char
            and self.end is None
        ):  # what nearly always happens
            self.texts.append(text)
            self.next_seq = first_seq + count
            self.next_char = first_char + len(text)
            if token_ids:
                self.token_ids += token_ids
            if logprobs:
                self.logprobs += logprobs
        elif self.end is not None or attempt < self.attempt:
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
        if self._last_word is not None:
            self._settle()
        return self.next_seq - first_seq

    def finish(self, end: StreamEnd) -> bool:
        """Take the last word; returns whether the stream is over, which waits for missing rows."""
        if self.end is not None or end.attempt < self.attempt:
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

    def _take(self, row: Row) -> None:
        skip = self.next_seq - row.first_seq
        skip_chars = self.next_char - row.first_char
        chars = len(row.text)
        if skip >= row.tokens and skip_chars >= chars:
            self.repeats += 1
            return
        if skip < row.tokens:
            self.token_ids += row.token_ids[skip:]
            self.logprobs += row.logprobs[skip:]
            self.next_seq = row.first_seq + row.tokens
        if skip_chars < chars:
            self.texts.append(row.text[skip_chars:])
            self.next_char = row.first_char + chars

    def _take_ahead(self) -> None:
        while True:
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
        if whole or end.kind is not OutcomeKind.COMPLETED:
            self.end = end
            self._ahead.clear()

    def drain(self) -> str:
        """The new text; token ids and log-probabilities are for the caller to take before."""
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return text
