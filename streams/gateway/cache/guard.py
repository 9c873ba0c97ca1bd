"""Whether two questions ask the same thing, as far as their words can tell.

Vectors cannot: those of "from pier 7" and "from pier 8" are nearly equal, as are those of a
question and its opposite. So all words that carry something have to be the same, in the same order;
spelling, articles and courtesies may differ. That refuses paraphrases in other words, which the
embedding model does not tell from other questions (`infra/bench/retrieval/cache.py` measures it).
Pure.
"""

import re
import unicodedata

_WORD = re.compile(r"[-+]?\d+(?:[.,:/]\d+)*|\w+(?:['’]\w+)?|[<>=+\-*/%^€$£#@&|~]")
_EMPTY = frozenset({"a", "an", "the", "do", "does", "please", "kindly", "hi", "hello", "thanks"})
_ASIDE = re.compile(
    r"\b(?:can|could|would|will) you (?:please |kindly )?(?:tell|say to) me\b(?! about)"
    r"|\b(?:please |kindly )tell me\b(?! about)"
    r"|\bi (?:would like|want|need) to know\b(?! about)"
    r"|\bthank you\b",
    re.IGNORECASE,
)
_SPELT = {
    "what's": ("what", "is"), "where's": ("where", "is"), "when's": ("when", "is"),
    "who's": ("who", "is"), "how's": ("how", "is"), "it's": ("it", "is"), "i'm": ("i", "am"),
    "isn't": ("is", "not"), "aren't": ("are", "not"), "don't": ("not",), "doesn't": ("not",),
    "didn't": ("did", "not"), "can't": ("can", "not"), "cannot": ("can", "not"),
    "won't": ("will", "not"), "wasn't": ("was", "not"), "weren't": ("were", "not"),
}  # fmt: skip


def asks_the_same(one: str, other: str) -> bool:
    """Whether what they ask is the same but for its spelling."""
    return one == other or meaning(one) == meaning(other) != ()


def meaning(question: str) -> tuple[str, ...]:
    """The words that carry something, in order.

    A short word in capitals is a name: `US` is not `us`, and of `vitamin A` nothing is left out.
    """
    text = _ASIDE.sub(" ", unicodedata.normalize("NFKC", question).replace("’", "'"))
    found: list[str] = []
    for number, word in enumerate(_WORD.findall(text)):
        is_name = word.isupper() and (len(word) > 1 or number > 0) and len(word) <= 3
        small = word if is_name and word != "I" else word.casefold()
        if small not in _EMPTY:
            found += _SPELT.get(small, (small,))
    return tuple(found)
