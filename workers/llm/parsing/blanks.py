"""Leaves out the white space that models write around their tool calls. Pure.

Such white space is no message: clients that read content before a call would take it for the
answer. What is left out depends on the answer alone, not on how its tokens are grouped.
"""

from collections.abc import Iterable
from dataclasses import replace

from schemas.records import AnswerDelta, DeltaKind


class BlankContent:
    """Holds back white space at the beginning of content until it is clear what follows."""

    def __init__(self) -> None:
        self._blank = ""
        self._is_open = False  # the last delta is content that is more than white space
        self._has_calls = False

    def take(self, deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
        """Return the next deltas without white space that stands alone."""
        visible_deltas = []
        for delta in deltas:
            if delta.kind is not DeltaKind.CONTENT:
                self._has_calls = self._has_calls or delta.kind is DeltaKind.CALL
                self._blank, self._is_open = "", False
            elif not self._is_open:
                delta = replace(delta, text=self._blank + delta.text)
                self._is_open = bool(delta.text.strip())
                self._blank = "" if self._is_open else delta.text
                if not self._is_open:
                    continue
            visible_deltas.append(delta)
        return visible_deltas

    def flush(self, seq: int) -> list[AnswerDelta]:
        """Return the white space at the end of an answer of `seq` tokens that has no call."""
        text, self._blank = self._blank, ""
        if not text or self._has_calls:
            return []
        return [AnswerDelta(seq=seq, kind=DeltaKind.CONTENT, text=text)]
