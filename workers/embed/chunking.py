"""Cuts a document's text into passages, by its structure and by tokens. Pure and deterministic.

Theory of operation. A text is divided into blocks: headings, paragraphs, and fenced code. A
paragraph is divided into sentences, code into lines, and a sentence longer than the bound of a
passage into runs of words. A word is cut only if it is longer than that bound, like an encoded file
or a key. The pieces are packed in order: a passage takes pieces while its tokens are within the
bound. A heading starts a new passage and stays with the text behind it. A paragraph that would be
split starts a new passage too, if the current one is half full. A passage that does not start at a
heading repeats the last whole pieces of the passage before, up to the overlap. So a passage is
always `text[start:end]`, and the same text is always cut in the same way.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workers.embed.embedders.words import PARTS, UNSPACED

_TOKEN_CHARS = 4  # typical length of a token
_KNOWN_CHARS_MAX, _UNSPACED_KNOWN_CHARS_MAX = 40, 8  # longest single token that is believed
_IS_UNSPACED = re.compile(rf"\S?[{UNSPACED}]")
_LINE = re.compile(r"[^\n]*\n?")
_HEADING = re.compile(r"\s{0,3}#{1,6}\s")
_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*([-*+•]|\d{1,3}[.)])\s")
# Behind the end of a sentence and its closing quotes; a small letter continues it, as in "e.g. a".
_SENTENCE_END = re.compile(
    rf"(?<=[.!?…])[\"'”’)\]]*\s+(?=[^\sa-zß-ÿ])|(?<=[。！？])(?=[{UNSPACED}\w])"
)


@dataclass(frozen=True, slots=True)
class Span:
    """A passage's place in the text, in characters."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part that is not divided further; `block_end` is its block's end if it starts a block."""

    start: int
    end: int
    is_heading: bool = False
    block_end: int = 0


def split_long_tokens(text: str, token_starts: Sequence[int]) -> list[int]:
    """Return the starts of tokens, with estimated ones inside overlong tokens, ascending.

    A tokenizer returns one token for a long run that it does not know: encoded bytes, or a script
    that is not in its vocabulary.
    """
    starts = list(token_starts)
    for start, end in pairwise((*token_starts, len(text))):
        if end - start > _UNSPACED_KNOWN_CHARS_MAX:
            run = text[start:end].rstrip()
            is_unspaced = _IS_UNSPACED.match(run)
            if len(run) > (_UNSPACED_KNOWN_CHARS_MAX if is_unspaced else _KNOWN_CHARS_MAX):
                step = 1 if is_unspaced else _TOKEN_CHARS
                starts += range(start + step, start + len(run), step)
    return sorted(starts)


def tokens_of(token_starts: Sequence[int], span: Span) -> int:
    """Return the number of tokens of a passage."""
    return bisect_left(token_starts, span.end) - bisect_left(token_starts, span.start)


class _Tokens:
    """Counts tokens between two positions of a text."""

    def __init__(self, starts: Sequence[int], tokens_max: int, overlap: int) -> None:
        self._starts = starts
        self.max, self.overlap = tokens_max, overlap

    def cuts(self, start: int, end: int, tokens_max: int) -> Iterator[tuple[int, int]]:
        """Divide the span into parts of at most `tokens_max` tokens."""
        first = bisect_left(self._starts, start + 1)
        for number in range(first + tokens_max - 1, bisect_left(self._starts, end), tokens_max):
            if (cut := self._starts[number]) > start:
                yield start, cut
                start = cut
        yield start, end

    def between(self, start: int, end: int) -> int:
        return tokens_of(self._starts, Span(start, end))


def cut(text: str, token_starts: Sequence[int], *, tokens_max: int, overlap: int) -> list[Span]:
    """Return the passages in order; none for a text of spaces only."""
    tokens = _Tokens(token_starts, tokens_max, overlap)
    spans: list[Span] = []
    passage: list[Piece] = []
    for piece in _pieces(text, tokens):
        if passage and _starts_passage(passage, piece, tokens):
            spans.append(Span(passage[0].start, passage[-1].end))
            passage = [] if piece.is_heading else _tail(passage, piece, tokens)
        passage.append(piece)
    if passage:
        spans.append(Span(passage[0].start, passage[-1].end))
    return spans


def _starts_passage(passage: list[Piece], piece: Piece, tokens: _Tokens) -> bool:
    start = passage[0].start
    if tokens.between(start, piece.end) > tokens.max:
        return True
    if piece.is_heading:
        return not all(packed_piece.is_heading for packed_piece in passage)
    torn = piece.block_end and tokens.between(start, piece.block_end) > tokens.max
    fits_alone = tokens.between(piece.start, piece.block_end) <= tokens.max
    half_full = 2 * tokens.between(start, passage[-1].end) >= tokens.max
    return bool(torn and fits_alone and half_full)


def _tail(passage: list[Piece], piece: Piece, tokens: _Tokens) -> list[Piece]:
    """Return the last pieces that fit into the overlap, and with the next piece into the bound."""
    tail: list[Piece] = []
    for last in reversed(passage[1:]):
        if last.is_heading or tokens.between(last.start, passage[-1].end) > tokens.overlap:
            break
        if tokens.between(last.start, piece.end) > tokens.max:
            break
        tail.insert(0, last)
    return tail


def _pieces(text: str, tokens: _Tokens) -> Iterator[Piece]:
    for start, end, kind in _blocks(text):
        if kind == "heading":
            yield from _whole(text, start, end, tokens, is_heading=True)
            continue
        first = True
        for piece in _parts(text, start, end, kind):
            for small in _whole(text, piece.start, piece.end, tokens):
                yield Piece(small.start, small.end, block_end=end if first else 0)
                first = False


def _blocks(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each block's start, end and kind: heading, text or code."""
    block_start, fence = -1, ""
    for line in _LINE.finditer(text):
        start, end, words = line.start(), line.end(), line.group()
        mark = _FENCE.match(words)
        if fence:  # it ends at a fence at least as long, with nothing behind it
            if mark and mark.group(1).startswith(fence) and not words[mark.end() :].strip():
                yield block_start, end, "code"
                block_start, fence = -1, ""
            continue
        is_heading = bool(_HEADING.match(words))
        if block_start >= 0 and (mark or is_heading or not words.strip()):
            yield block_start, start, "text"
            block_start = -1
        if mark:
            block_start, fence = start, mark.group(1)
        elif is_heading:
            yield start, end, "heading"
        elif block_start < 0 and words.strip():
            block_start = start
    if block_start >= 0:
        yield block_start, len(text), "code" if fence else "text"


def _parts(text: str, start: int, end: int, kind: str) -> Iterator[Piece]:
    """Yield sentences, items of a list, or lines of code."""
    lines = [
        (start + match.start(), start + match.end()) for match in _LINE.finditer(text[start:end])
    ]
    if kind == "code":
        yield from (_trimmed(text, *line) for line in lines if text[slice(*line)].strip())
        return
    marks = [at for at, line_end in lines if _ITEM.match(text[at:line_end])]
    marks += [start + match.end() for match in _SENTENCE_END.finditer(text[start:end])]
    edges = sorted({start, end, *marks})
    for edge, next_edge in zip(edges, edges[1:], strict=False):
        if text[edge:next_edge].strip():
            yield _trimmed(text, edge, next_edge)


def _whole(
    text: str, start: int, end: int, tokens: _Tokens, *, is_heading: bool = False
) -> Iterator[Piece]:
    """Yield the piece; if it is too long, runs of its words that fit into the overlap."""
    piece = _trimmed(text, start, end)
    if tokens.between(piece.start, piece.end) <= tokens.max:
        yield Piece(piece.start, piece.end, is_heading)
        return
    limit = tokens.overlap or tokens.max
    run_start, last = piece.start, piece.start
    for word in PARTS.finditer(text, piece.start, piece.end):
        for first, end in tokens.cuts(*word.span(), tokens.max):
            if last > run_start and tokens.between(run_start, end) > limit:
                yield Piece(run_start, last)
                run_start = first
            last = end
    yield Piece(run_start, last)


def _trimmed(text: str, start: int, end: int) -> Piece:
    words = text[start:end]
    return Piece(start + len(words) - len(words.lstrip()), start + len(words.rstrip()))
