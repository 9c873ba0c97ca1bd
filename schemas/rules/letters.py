"""Normalizes characters with the same meaning, for embedders, word lists and texts of PDFs.

Ligatures, full-width and half-width forms, letters of mathematical fonts, presentation forms of
Arabic and Hebrew become the letters that they stand for, as in Unicode's NFKC. NFKC also joins
characters that should stay apart, so here a superscript number or letter gets a `^` (`10⁶` is not
106, `2ⁿ` not 2n), a subscript number beside digits a `_` (`101₂` is not 1012), a fraction a space
(`1½` is not 11/2), and marks beside a word (™, ①, a lone accent) stay. Invisible characters, such
as a soft hyphen, are removed. Pure.
"""

import re
import unicodedata
from functools import cache

# Soft hyphen, line joiners, direction marks; not the invisible ones between words or letters.
_UNSEEN = [0xAD, 0xFEFF, 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070)]
_DIGITS, _SIGNS = "⁰¹²³⁴-⁹", "⁺⁻"
_LETTERS = "".join(  # superscripts of one letter each; ª and º are ordinals
    letter
    for letter in map(chr, range(0xBB, 0x2C7E))
    if unicodedata.decomposition(letter).startswith("<super>")
    and len(unicodedata.normalize("NFKC", letter)) == 1
    and unicodedata.normalize("NFKC", letter).isalpha()
)
# A number, a letter, or several of these joined by signs; not ordinals such as `1ᵉʳ` and `2ᵉ`.
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
_LAST = 0x2FA1E  # beyond it, no character has a replacement


def plain_letters(text: str) -> str:
    """Return the text in the usual characters; a text that has only those is unchanged."""
    if text.isascii():
        return text
    if not _usual().keys().isdisjoint(map(ord, set(text))):  # a look at each letter is slow
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
    """Return the replacements of all characters that have one, by code point."""
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
