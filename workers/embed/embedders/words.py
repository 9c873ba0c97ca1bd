"""Finds the words of a text in any script, and where a long text may be cut.

Chinese, Japanese, Thai and other scripts put no spaces between words, so each of their characters
counts as a word, together with its combining marks.
"""

import re
from collections.abc import Iterator

from schemas.rules.letters import MARKS

# Kana, Han and their punctuation, compatibility forms, halfwidth and fullwidth forms; Thai, Lao,
# Tibetan, Burmese, Khmer, Tai Lue, Tai Tham, Balinese, Javanese.
UNSPACED = (
    "\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aad\u1b00-\u1b7f\ua980-\ua9df"
    "\uaa60-\uaadf"
)
# Vowels that stand before their consonant, and signs that put a consonant below another one.
_BEFORE, _BELOW = "\u0e40-\u0e44\u0ec0-\u0ec4", "\u1039\u17d2\u1a60"
_CHARACTER = f"[{_BEFORE}]?[{UNSPACED}](?:[{_BELOW}].|[{MARKS}])*"
PARTS = re.compile(rf"{_CHARACTER}|[^\s{UNSPACED}]+")
TOKENS = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")
SLICE_CHARS = 8_192


def slices(text: str, chars_max: int = SLICE_CHARS) -> Iterator[tuple[int, int]]:
    """Yield starts and ends of pieces that are tokenized one by one, so that a long text does not
    block other threads. A piece ends behind a space, if there is one."""
    begin = 0
    while len(text) - begin > chars_max:
        end = begin + chars_max
        space = max(text.rfind(mark, begin + chars_max // 2, end) for mark in " \n")
        end = space + 1 if space >= 0 else end
        yield begin, end
        begin = end
    if begin < len(text):
        yield begin, len(text)
