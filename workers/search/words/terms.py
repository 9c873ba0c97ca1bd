"""Cuts text into terms, which BM25 counts: the same for passages and for what is searched for.

Words of any script, case-folded, with their combining marks. Scripts that leave no room between
words (Chinese, Japanese, Thai and others; Korean, whose words carry endings) become pairs of
neighbours, and in passages single characters beside them, so that one character is found as well.
An emoji is a term. No stemming: a term is what stands there.
"""

import re
import unicodedata

TERM_CHARS_MAX = 64  # what is longer is cut off; no word is
# Without the modifiers of skin, which say nothing of what a sign is.
_SIGNS = "\u2600-\u27bf\U0001f000-\U0001f3fa\U0001f400-\U0001faff"
_DENSE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_MARKS = "".join(
    re.escape(each)
    for each in map(chr, range(0x300, 0xFE30))
    if unicodedata.category(each).startswith("M")
)
_LETTER = f"(?![{_DENSE}_])\\w"
_TERM = re.compile(f"([{_DENSE}]+)|([{_SIGNS}])|({_LETTER}(?:{_LETTER}|[{_MARKS}])*)")
_PLAIN = re.compile(r"[a-z0-9]+")
# Vowel signs of Arabic, which few write, and the bar that stretches words.
_UNWRITTEN = dict.fromkeys([*range(0x64B, 0x660), 0x670, 0x640])


def terms_of(text: str) -> list[str]:
    """The terms of a passage, in order, repeated ones too."""
    return _terms(text, singles=True)


def terms_asked(text: str) -> list[str]:
    """The terms of what is searched for, each once, in order."""
    return list(dict.fromkeys(_terms(text, singles=False)))


def _terms(text: str, *, singles: bool) -> list[str]:
    if text.isascii():
        return [each[:TERM_CHARS_MAX] for each in _PLAIN.findall(text.lower())]
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    found: list[str] = []
    for dense, sign, word in _TERM.findall(folded.translate(_UNWRITTEN)):
        if dense:
            found += [dense[at : at + 2] for at in range(len(dense) - 1)]
            if singles or len(dense) == 1:
                found += dense
        else:
            found.append((sign or word)[:TERM_CHARS_MAX])
    return found
