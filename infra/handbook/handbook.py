"""Generates a handbook of a town that does not exist, from a seed, and questions about it.

Names and values are random, so no model can know the answers: a right answer was found. The first
documents of a larger handbook are those of a smaller one with the same seed, so that the same
questions can be asked of both.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from infra.handbook.kinds import KINDS, Fact, ThingKind

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st",
           "t", "tr", "v", "w")  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "au", "ei")
_ENDS = ("ndry", "lm", "sk", "rt", "nn", "veth", "mar", "lo", "dis", "ck", "rin", "bel")


@dataclass(frozen=True, slots=True)
class HandbookQuestion:
    """A question, the value that its answer must contain, and the document that has it."""

    text: str
    value: str
    document_id: str
    is_paraphrased: bool
    wrong_values: tuple[str, ...] = ()  # values as likely as the right one

    def is_right(self, answer: str) -> bool:
        """Return whether an answer has the value, and none of the wrong ones."""
        text = answer.casefold()
        return _has(text, self.value) and not any(_has(text, wrong) for wrong in self.wrong_values)


@dataclass(frozen=True, slots=True)
class Page:
    """A document of the handbook."""

    document_id: str
    title: str
    text: str
    questions: tuple[HandbookQuestion, ...]  # plain ones, one for each fact
    paraphrased: tuple[HandbookQuestion, ...]  # the same questions in other words

    def edited(self) -> "Page":
        """Return the page with another value of its first fact, as an author would change it."""
        old = self.questions[0]
        new = str(int(old.value) + 1) if old.value.isdigit() else old.wrong_values[0]
        first = replace(old, value=new)
        text = self.text.replace(old.value, new, 1)
        return replace(self, text=text, questions=(first, *self.questions[1:]))


def handbook(pages: int, *, seed: int = 7) -> list[Page]:
    """Return a handbook of `pages` pages; raises ValueError for more than some thousands."""
    draw = random.Random(seed)
    names = [f"{a}{b}{c}".capitalize() for a, b, c in product(_ONSETS, _VOWELS, _ENDS)]
    if pages > (pages_max := len(names) * 2):
        raise ValueError(f"expected at most {pages_max} pages, found {pages}")
    draw.shuffle(names)
    doubles = [f"{first} {last}" for first, last in zip(names, reversed(names), strict=True)]
    return [
        _page(KINDS[number % len(KINDS)], name, random.Random(f"{seed} {number}"))
        for number, name in zip(range(pages), _in_turn(names, doubles), strict=False)
    ]


def questions(pages: Sequence[Page], count: int, *, seed: int = 7) -> list[HandbookQuestion]:
    """Return questions about these pages, a third of them in other words than the page's."""
    draw = random.Random(f"questions {seed}")
    sample = []
    for number in range(count):
        page = draw.choice(pages)
        forms = page.paraphrased if number % 3 == 2 else page.questions
        sample.append(draw.choice(forms))
    return sample


def _in_turn(names: Sequence[str], doubles: Sequence[str]) -> Iterator[str]:
    yield from names
    yield from doubles


def _page(kind: ThingKind, name: str, draw: random.Random) -> Page:
    document_id = f"{kind.noun}-{name.lower().replace(' ', '-')}"
    values = [str(draw.choice(fact.values)) for fact in kind.facts]
    lines = [
        fact.statement.format(name=name, value=value)
        for fact, value in zip(kind.facts, values, strict=True)
    ]
    plain, paraphrased = [], []
    for fact, value in zip(kind.facts, values, strict=True):
        plain.append(_question(fact, fact.question, name, value, document_id, False))
        paraphrased.append(_question(fact, fact.paraphrase, name, value, document_id, True))
    title = f"The {name} {kind.noun}"
    return Page(document_id, title, " ".join(lines), tuple(plain), tuple(paraphrased))


def _question(
    fact: Fact, form: str, name: str, value: str, document_id: str, is_paraphrased: bool
) -> HandbookQuestion:
    words = () if isinstance(fact.values, range) else fact.values
    return HandbookQuestion(
        form.format(name=name),
        value,
        document_id,
        is_paraphrased,
        tuple(word for word in words if word != value),
    )


def _has(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text) is not None
