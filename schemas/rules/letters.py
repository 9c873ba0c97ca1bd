"""One spelling for characters that mean the same, for embedders, lists of words, and texts of PDFs.

Ligatures, full-width and half-width forms, letters of mathematical fonts, presentation forms of
Arabic and Hebrew become the letters that they stand for, as by Unicode's NFKC. That also joins what
should stay apart, so here a raised number gets a `^` (`10⁶` is no 106), a fraction a space (`1½` is
no 11/2), and what stands beside a word (™, ①, a lone accent) stays. What is not seen, as a soft
hyphen, goes. Pure.
"""

import re
import unicodedata
from functools import cache

# Soft hyphen, joiners of lines, marks of direction. Not those between words or letters.
_UNSEEN = [0xAD, 0xFEFF, 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070)]
_RAISED = re.compile(r"(?<=[^\W_])[⁺⁻]?[⁰¹²³⁴-⁹]+|(?<=[)\]])[⁺⁻]?[⁰¹²³⁴-⁹]+")
_FRACTION = re.compile(r"(?<=\d)(?=[¼½¾⅐-⅞])")
MARKS = "".join(  # accents, points and vowel signs, for a class of a regular expression
    re.escape(sign)
    for sign in map(chr, range(0x300, 0xFE30))
    if unicodedata.category(sign).startswith("M")
)
_LAST = 0x2FA1E  # beyond it, no character stands for another


def plain_letters(text: str) -> str:
    """The text in the usual characters; what has only those stays as it is."""
    if text.isascii():
        return text
    if not _usual().keys().isdisjoint(map(ord, set(text))):  # to look at each letter is slow
        text = _RAISED.sub(lambda found: "^" + found.group(), text)
        text = _FRACTION.sub(" ", text).translate(_usual())
    return unicodedata.normalize("NFC", text)


@cache
def _usual() -> dict[int, str | None]:
    """What stands for each character that has something in its stead."""
    found: dict[int, str | None] = dict.fromkeys(_UNSEEN)
    for code in range(0x80, _LAST):
        kind = unicodedata.decomposition(chr(code)).partition(" ")[0]
        if not kind.startswith("<") or kind == "<circle>":
            continue
        usual = unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/")
        if usual[:1].isspace() and len(usual) > 1:  # an accent that stands alone
            continue
        if kind == "<super>" and len(usual) > 1:  # a mark beside a word
            continue
        found[code] = usual.replace("\u2212", "-") if kind == "<super>" else usual
    return found
