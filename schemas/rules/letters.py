"""One spelling for characters that mean the same, for embedders, lists of words, and texts of PDFs.

Ligatures, full-width and half-width forms, letters of mathematical fonts, presentation forms of
Arabic and Hebrew become the letters that they stand for, as by Unicode's NFKC. That also joins what
should stay apart, so here a raised number or letter gets a `^` (`10⁶` is no 106, `2ⁿ` no 2n), a
lowered number beside digits a `_` (`101₂` is no 1012), a fraction a space (`1½` is no 11/2), and
what stands beside a word (™, ①, a lone accent) stays. What is not seen, as a soft hyphen, goes.
Pure.
"""

import re
import unicodedata
from functools import cache

# Soft hyphen, joiners of lines, marks of direction. Not those between words or letters.
_UNSEEN = [0xAD, 0xFEFF, 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070)]
_DIGITS, _SIGNS = "⁰¹²³⁴-⁹", "⁺⁻"
_LETTERS = "".join(  # that stand for one each; ª and º are ordinals
    letter
    for letter in map(chr, range(0xBB, 0x2C7E))
    if unicodedata.decomposition(letter).startswith("<super>")
    and len(unicodedata.normalize("NFKC", letter)) == 1
    and unicodedata.normalize("NFKC", letter).isalpha()
)
# A number, a letter, or what signs join of these; no ordinal, as `1ᵉʳ` and `2ᵉ` are.
_OPERAND = (
    rf"(?:[{_DIGITS}]+(?:[{_LETTERS}](?![{_LETTERS}]))?|(?![ᵃᵉᵒ])[{_LETTERS}](?![{_LETTERS}]))"
)
_RAISED = re.compile(
    rf"(?:(?<=[^\W_])|(?<=[)\]]))(?<![{_DIGITS}{_SIGNS}{_LETTERS}])"
    rf"[{_SIGNS}]?{_OPERAND}((?:[{_SIGNS}]{_OPERAND})*)"
)
_LOWERED = re.compile(rf"(?<=[\d{_DIGITS}])[₀-₉]+|(?<![₀-₉])[₀-₉]+(?=\d)")
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
        text = _RAISED.sub(_raised, text)
        text = _LOWERED.sub(_lowered, text)
        text = _FRACTION.sub(" ", text).translate(_usual())
    return unicodedata.normalize("NFC", text)


def _raised(match: re.Match[str]) -> str:
    return f"^({match.group()})" if match.group(1) else "^" + match.group()


def _lowered(match: re.Match[str]) -> str:
    is_before_digit = match.string[match.end() : match.end() + 1].isdecimal()
    return f"_{match.group()} " if is_before_digit else "_" + match.group()


@cache
def _usual() -> dict[int, str | None]:
    """What stands for each character that has something in its stead."""
    letters: dict[int, str | None] = dict.fromkeys(_UNSEEN)
    for code in range(0x80, _LAST):
        kind = unicodedata.decomposition(chr(code)).partition(" ")[0]
        if not kind.startswith("<") or kind == "<circle>":
            continue
        usual = unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/")
        if usual[:1].isspace() and len(usual) > 1:  # an accent that stands alone
            continue
        if kind == "<super>" and len(usual) > 1:  # a mark beside a word
            continue
        letters[code] = usual.replace("\u2212", "-") if kind == "<super>" else usual
    return letters
