"""Words of a text, whatever its script; where one may be cut from the next.

Chinese, Japanese, Thai and others put no spaces between words, so each of their characters counts
as one, with the marks that belong to it.
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
# A vowel that stands before its consonant, and a consonant below another one.
_BEFORE, _BELOW = "\u0e40-\u0e44\u0ec0-\u0ec4", "\u1039\u17d2\u1a60"
_CHARACTER = f"[{_BEFORE}]?[{UNSPACED}](?:[{_BELOW}].|[{MARKS}])*"
PARTS = re.compile(rf"{_CHARACTER}|[^\s{UNSPACED}]+")
TOKENS = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")
SLICE_CHARS = 8_192


def slices(text: str, chars_max: int = SLICE_CHARS) -> Iterator[tuple[int, int]]:
    """Begins and ends of pieces that are tokenised one by one, so that no text holds up whoever
    shares the interpreter. They end behind a space, if there is one."""
    begin = 0
    while len(text) - begin > chars_max:
        end = begin + chars_max
        space = max(text.rfind(mark, begin + chars_max // 2, end) for mark in " \n")
        end = space + 1 if space >= 0 else end
        yield begin, end
        begin = end
    if begin < len(text):
        yield begin, len(text)
