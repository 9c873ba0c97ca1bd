"""Finds stop strings in the text of one answer, which arrives in pieces of whole characters. Pure.

Text that may still become a stop string is held back until that is decided. The simulated engine
ends its answers with `StopText`. `certain_text` cuts the text of a prefill's first token, for any
engine.
"""

from collections.abc import Sequence

from schemas.records import Sampling


def certain_text(text: str, sampling: Sampling) -> str:
    """Return the part of a first token's text that no later token can cut.

    An engine that stops after one token does not hold back the beginning of a stop string. The
    decode engine would find the whole stop string and cut it off, after the client has seen its
    beginning.
    """
    if sampling.include_stop:
        return text
    return StopText(sampling.stop, include_stop=False).feed(text, may_stop=False)


class StopText:
    """Takes pieces of text, and returns the text that may be shown."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._buffer = ""
        self._unsent, self._sent_chars = "", 0  # of a prior text, see `take_prior`
        self.matched_stop = ""

    def take_prior(self, pieces: Sequence[str], *, min_tokens: int, sent_chars: int) -> None:
        """Take the text of an answer's first tokens, of which `sent_chars` have been shown.

        The next text that is returned continues after these.
        """
        text = ""
        for token_count, piece in enumerate(pieces, 1):
            text += self.feed(piece, may_stop=token_count > min_tokens)
            if self.matched_stop:
                break
        self._unsent, self._sent_chars = text[sent_chars:], max(0, sent_chars - len(text))

    def feed(self, piece: str, *, may_stop: bool = True) -> str:
        """Return the text that is now certain; a stop string sets `matched_stop`."""
        text = self._buffer + piece
        if may_stop:
            matches = [(text.find(stop), stop) for stop in self._stops]
            matches = [(at, stop) for at, stop in matches if at >= 0]
            if matches:
                at, self.matched_stop = min(matches, key=lambda pair: (pair[0], len(pair[1])))
                self._buffer = ""
                return self._new(text[: at + len(self.matched_stop) if self._include_stop else at])
        keep = self._undecided(text)
        self._buffer = text[len(text) - keep :]
        return self._new(text[: len(text) - keep])

    def flush(self) -> str:
        """Return the text held back; for an answer that ended without a stop string."""
        text, self._buffer = self._buffer, ""
        return self._new(text)

    def _new(self, text: str) -> str:
        """Return a text without what has been shown of it, after what has not."""
        unsent, self._unsent = self._unsent, ""
        repeated_chars = min(self._sent_chars, len(text))
        self._sent_chars -= repeated_chars
        return unsent + text[repeated_chars:]

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
