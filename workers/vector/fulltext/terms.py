"""Cuts text into the terms that BM25 counts: the same for passages and for queries.

Terms are words of any script, case-folded, with their combining marks. Scripts without spaces
between words (Chinese, Japanese, Thai and others; Korean, whose words have endings) are cut into
pairs of adjacent characters; passages also get the single characters, so that a query of one
character finds them. An emoji is a term. There is no stemming.

Optional spellings make no other term, as in Lucene's analysers: points of Hebrew, vowel signs of
Arabic, the forms of its alef, yeh, heh and kaf, the dots of Turkish and Russian letters, the
accents of Greek ones, which capitals lack, and the digits of each script.
"""

import re
import unicodedata

from schemas.rules.letters import MARKS, plain_letters

TERM_CHARS_MAX = 64  # longer terms are cut off; no word is that long
# Without the skin tone modifiers, which do not change the meaning of a sign.
_SIGNS = "\u2600-\u27bf\U0001f000-\U0001f3fa\U0001f400-\U0001faff"
_DENSE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_LETTER = f"(?![{_DENSE}_])\\w"
_TERM = re.compile(f"([{_DENSE}]+)|([{_SIGNS}])|({_LETTER}(?:{_LETTER}|[{MARKS}])*)")
_PLAIN = re.compile(r"[a-z0-9]+")
# Marks between the letters of one word: geresh and gershayim of Hebrew, also as ASCII quotes, and
# joiners; not Arabic's non-joiner, which divides a word.
_WITHIN = re.compile("(?<=[א-ת])[\"'\u05f3\u05f4](?=[א-ת])|\u200d|(?<![\u0600-\u06ff])\u200c")
_HEBREW_POINTS = (*range(0x591, 0x5BE), 0x5BF, 0x5C1, 0x5C2, 0x5C4, 0x5C5, 0x5C7)
_ARABIC_SIGNS = (*range(0x610, 0x61B), *range(0x64B, 0x660), 0x670, 0x640, *range(0x6D6, 0x6DD))
_SAME = {
    **dict.fromkeys("آأإٱ", "ا"),
    **dict.fromkeys("ىیې", "ي"),
    **dict.fromkeys("ةۀہۃھە", "ه"),
    "ک": "ك",
    "ı": "i",
    "ё": "е",
}


def _folds() -> dict[int, str | None]:
    folds: dict[int, str | None] = dict.fromkeys((*_HEBREW_POINTS, *_ARABIC_SIGNS))
    folds |= {ord(letter): same for letter, same in _SAME.items()}
    for code in (*range(0x370, 0x400), *range(0x1F00, 0x2000)):  # Greek
        bare = unicodedata.normalize("NFD", chr(code))[0]
        if bare != chr(code) and bare.isalpha():
            folds[code] = bare
    for code in range(0x660, 0x1E960):
        if (digit := unicodedata.decimal(chr(code), None)) is not None:
            folds[code] = str(digit)
    return folds


_FOLDS = _folds()
_CHANGED = _FOLDS.keys() | {*range(0x5D0, 0x5F5), 0x200C, 0x200D}


def terms_of(text: str) -> list[str]:
    """Return the terms of a passage, in order, repeated ones too."""
    return _terms(text, singles=True)


def query_terms(text: str) -> list[str]:
    """Return the terms of a query, each once, in order."""
    return list(dict.fromkeys(_terms(text, singles=False)))


def _terms(text: str, *, singles: bool) -> list[str]:
    if text.isascii():
        return [term[:TERM_CHARS_MAX] for term in _PLAIN.findall(text.lower())]
    terms: list[str] = []
    for dense, sign, word in _TERM.findall(_folded(text)):
        if dense:
            terms += [dense[at : at + 2] for at in range(len(dense) - 1)]
            if singles or len(dense) == 1:
                terms += dense
        else:
            terms.append((sign or word)[:TERM_CHARS_MAX])
    return terms


def _folded(text: str) -> str:
    small = plain_letters(text).casefold().replace("i\u0307", "i")  # the folded form of İ
    if _CHANGED.isdisjoint(map(ord, set(small))):  # the translation below is slow
        return small
    return unicodedata.normalize("NFC", _WITHIN.sub("", small).translate(_FOLDS))
