"""Decides whether two questions ask the same, as far as their words can tell. Pure.

Vectors cannot tell: those of "from pier 7" and "from pier 8" are nearly equal, as are those of a
question and its opposite. So all words have to be the same, in the same order, except for a closed
list: capitals at the beginning of words, articles and `do` before words, courtesies before and
after the question, stops at the end of words, and a few short forms. Brackets, signs, quotes, emoji
and the vowel signs of any script count. This refuses paraphrases, which the embedding model does
not distinguish from other questions (measured by `infra/bench/retrieval/cache.py`).
"""

import re
from collections.abc import Sequence

from schemas.rules.letters import MARKS, plain_letters

_WORD = re.compile(rf"[-+]?\.?\d+(?:[.,:/]\d+)*|\w[\w{MARKS}]*(?:'\w[\w{MARKS}]*)?|\S", re.DOTALL)
_STOPS = re.compile(r"(?<=[^\s,;:.?!])[,;:.?!]+(?=\s|$)|[¿¡。、]|\ufe0f")
_FACTORIAL = re.compile(r"(?:\d|\)|(?<![^\W\d_])[^\W\d_])(?=!)")  # `5!`, `(n + 1)!`, `n!`
_BEFORE_WORDS = frozenset(("a", "an", "the", "do", "does"))
_GREETING = re.compile(
    r"\A\s*(?:hi|hello|hey)\s*[,!.]\s*|\A\s*(?:please|kindly)[,:]?\s+", re.IGNORECASE
)
_ASIDE = re.compile(
    r"\A\s*(?:(?:can|could|would|will) you (?:please |kindly )?(?:tell|say to) me"
    r"|(?:please |kindly )?tell me"
    r"|i (?:would like|want|need) to know)\b(?! about\b)\s*[,:]?\s*",
    re.IGNORECASE,
)
_THANKS = re.compile(r"(?<=[,.?!;])\s*(?:thanks|thank you|please)[\s.!?]*\Z", re.IGNORECASE)
_SAYS_WHAT = re.compile(r"[:\"«„`]|(?<!\w)'")  # a quoted subject may follow
_SPELT = {
    "what's": ("what", "is"), "where's": ("where", "is"), "when's": ("when", "is"),
    "who's": ("who", "is"), "how's": ("how", "is"), "it's": ("it", "is"), "i'm": ("i", "am"),
    "isn't": ("is", "not"), "aren't": ("are", "not"), "don't": ("not",), "doesn't": ("not",),
    "didn't": ("did", "not"), "can't": ("can", "not"), "cannot": ("can", "not"),
    "won't": ("will", "not"), "wasn't": ("was", "not"), "weren't": ("were", "not"),
}  # fmt: skip
_QUOTES = str.maketrans("’‘“”", "''\"\"")


def asks_the_same(first: str, second: str) -> bool:
    """Return whether two questions are the same except for their spelling."""
    return first == second or meaning(first) == meaning(second) != ()


def meaning(question: str) -> tuple[str, ...]:
    """Return the words and signs that count, in order.

    A short word in capitals is a name: `US` is not `us`, and nothing is left out of `vitamin A`.
    """
    text = plain_letters(question).translate(_QUOTES)
    for courtesy in (_GREETING, _ASIDE):
        text = courtesy.sub("", text)
    if not _SAYS_WHAT.search(text):
        text = _THANKS.sub("", text)
    words = _WORD.findall(_STOPS.sub(" ", _FACTORIAL.sub(r"\g<0> ", text)))
    terms: list[str] = []
    for number, word in enumerate(words):
        is_name = word.isupper() and (len(word) > 1 or number > 0) and len(word) <= 3
        # Not casefold, which would turn `Maße` into `masse`.
        small = word if is_name and word != "I" else word.lower()
        if small not in _BEFORE_WORDS or not _goes_before(small, words[number + 1 : number + 2]):
            terms += _SPELT.get(small, (small,))
    return tuple(terms)


def _goes_before(word: str, following: Sequence[str]) -> bool:
    """Return whether a word is an article or `do` here; `a` before a letter or a sign is a name."""
    return bool(following) and (word != "a" or following[0][:2].isalpha() and len(following[0]) > 1)
