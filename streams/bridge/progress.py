"""Tracks which prompts of a partition are answered, and encodes that for the next owner. Pure.

A group commits one offset: the first prompt without an answer. Answers are committed in any order,
so the commit's metadata has a bitmap of the later answered prompts, and the offsets from which
tokens of open prompts may lie.
"""

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

WINDOW = 2_000  # offsets after the first without an answer; metadata has at most 4 096 bytes
WINDOW_BYTES = 16 << 20  # of prompts that were read and not answered
_PLACES, _BITMAP, _BYTES, _STARTS, _READING, _FALLS = "t", "d", "w", "b", "r", "f"


@dataclass(frozen=True, slots=True)
class CommitNote:
    """The metadata of a commit."""

    tokens: Mapping[int, int] = field(default_factory=dict)  # partition of `tokens`, offset
    answered: Set[int] = frozenset()  # offsets of answered prompts after the committed one
    window_bytes: int = WINDOW_BYTES  # how many bytes the committer may have read ahead
    start_count: int = 0  # processors that started at this position and committed no answer
    suspect_offset: int = -1  # the prompt that is read with care, or on which processors crashed
    falls: int = 0  # processors that began to read it, and did not report the end of that


def encode(note: CommitNote, position: int) -> str:
    """Return the note as metadata of a commit at this position."""
    packed = bytearray((max(note.answered, default=position - 1) - position + 8) // 8)
    for offset in note.answered:
        packed[(offset - position) // 8] |= 1 << (offset - position) % 8
    places = [list(place) for place in sorted(note.tokens.items())]
    bitmap = base64.b64encode(packed).decode()
    fields = {_PLACES: places, _BITMAP: bitmap, _BYTES: note.window_bytes}
    if note.start_count:
        fields[_STARTS] = note.start_count
    if note.falls:
        fields |= {_READING: note.suspect_offset, _FALLS: note.falls}
    return json.dumps(fields, separators=(",", ":"))


def decode(metadata: str, position: int) -> CommitNote:
    """Return the note of a commit; an empty one if a tool or another program set the offset."""
    try:
        fields = json.loads(metadata)
        places = {int(partition): int(offset) for partition, offset in fields[_PLACES]}
        packed = base64.b64decode(fields[_BITMAP], validate=True)
        window_bytes = int(fields.get(_BYTES, sys.maxsize))  # earlier versions had no bound
        start_count, suspect_offset = int(fields.get(_STARTS, 0)), int(fields.get(_READING, -1))
        falls = int(
            fields.get(_FALLS, suspect_offset >= 0)
        )  # earlier versions recorded only the last processor
    except (ValueError, TypeError, KeyError):
        return CommitNote()
    answered = {position + n for n in range(8 * len(packed)) if packed[n // 8] >> n % 8 & 1}
    return CommitNote(places, answered, window_bytes, start_count, suspect_offset, falls)


class OffsetTracker:
    """Tracks which prompts of one partition are answered, in any order."""

    def __init__(self, position: int, answered: Iterable[int] = ()) -> None:
        """Start from the former owner's commit: its position, and later answered prompts."""
        self.window_bytes = WINDOW_BYTES
        self._bytes = 0  # of open prompts
        self.next_offset = position  # after the last offset that was read or is missing
        self._open: dict[int, int] = {}  # sizes of unanswered prompts by offset, in order
        self._prior_answers = {
            offset for offset in answered if offset >= position
        }  # read only by former owners

    def position(self, answered_offsets: Set[int] = frozenset()) -> int:
        """Return the first offset without an answer, if `answered_offsets` have theirs."""
        return next(
            (offset for offset in self._open if offset not in answered_offsets), self.next_offset
        )

    def answered(self, answered_offsets: Set[int] = frozenset()) -> set[int]:
        """Return the offsets after that position that need no answer, including missing ones."""
        behind = range(self.position(answered_offsets), self.next_offset)
        return {
            n for n in behind if n not in self._open or n in answered_offsets
        } | self._prior_answers

    def has_room(self, offset: int, size: int = 0) -> bool:
        """Return whether a prompt of `size` bytes at this offset may be read; a first one may."""
        fits = not self._open or self._bytes + size <= self.window_bytes
        return fits and offset - self.position() < WINDOW

    def take(self, offset: int, size: int = 0) -> bool:
        """Note that a record was read; return whether it needs an answer. Offsets before it that
        were not read are missing: compacted, or a transaction marker.
        """
        if offset < self.next_offset:
            return False
        is_answered = offset in self._prior_answers
        self.pass_over(offset + 1)
        if not is_answered:
            self._open[offset] = size
            self._bytes += size
        return not is_answered

    def pass_over(self, offset: int) -> None:
        """Treat every offset before this one as read or missing."""
        self.next_offset = max(offset, self.next_offset)
        if self._prior_answers:
            self._prior_answers = {
                prior for prior in self._prior_answers if prior >= self.next_offset
            }

    def mark_answered(self, offsets: Iterable[int]) -> None:
        """Mark these prompts as answered: their answers are committed."""
        for offset in offsets:
            self._bytes -= self._open.pop(offset)
