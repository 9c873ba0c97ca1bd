"""Words of a text, whatever its script; where one may be cut from the next.

Chinese and Japanese put no spaces between words, so each of their characters counts as one.
"""

import re
from collections.abc import Iterator

# Kana, Han and their punctuation, compatibility forms, halfwidth and fullwidth forms.
UNSPACED = "\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
RUN_CHARS_MAX = 200  # what has no space for longer is no word: a key, or an encoded file
PARTS = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,{RUN_CHARS_MAX}}}")
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
