"""Measures how often the response cache would give the answer of a different question.

Compares pairs of questions by the similarity of their vectors, with and without the gateway's
guard. Most pairs are drawn from the handbook's questions: spelt differently, paraphrased, about
another thing of the same kind, and about another fact of the same thing. `question_pairs.jsonl` has
pairs written by hand: other numbers, names, negations, opposites, order.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.handbook.handbook import Page, handbook
from schemas.retrieval import Vector
from streams.openai.cache.guard import asks_the_same

BY_HAND = Path(__file__).with_name("question_pairs.jsonl")
THRESHOLDS = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_COURTESIES = (
    "Please tell me: {}", "Hello, {}", "Could you tell me {}", "{} Thanks", "I want to know: {}"
)  # fmt: skip
_Z = 1.96  # standard score of a 95 % interval


@dataclass(frozen=True, slots=True)
class QuestionPair:
    """Two questions, and whether one answer is right for both."""

    first: str
    second: str
    is_same: bool
    kind: str


def by_hand() -> list[QuestionPair]:
    """Return the pairs of `question_pairs.jsonl`, which were written by hand."""
    return [QuestionPair(**json.loads(line)) for line in BY_HAND.read_text().splitlines()]


def draw_pairs(pages: int, count: int, *, seed: int = 7) -> list[QuestionPair]:
    """Draw `count` pairs of each kind from the handbook."""
    draw, book = random.Random(f"pairs {seed}"), handbook(pages, seed=seed)
    by_noun: dict[str, list[Page]] = {}
    for page in book:
        by_noun.setdefault(page.document_id.partition("-")[0], []).append(page)
    kinds: dict[str, Callable[[Page], tuple[str, str]]] = {
        "spelling": lambda page: _respelt(draw, _plain(draw, page)),
        "words": lambda page: _in_other_words(draw, page),
        "other thing": lambda page: _of_another(draw, page, by_noun),
        "other fact": lambda page: _other_fact(draw, page),
    }
    return [
        QuestionPair(*make(draw.choice(book)), is_same=kind in ("spelling", "words"), kind=kind)
        for kind, make in kinds.items()
        for _ in range(count)
    ]


def _plain(draw: random.Random, page: Page) -> str:
    return draw.choice(page.questions).text


def _respelt(draw: random.Random, question: str) -> tuple[str, str]:
    inner = question[0].lower() + question[1:]
    bare = question.rstrip("?")
    return question, draw.choice([draw.choice(_COURTESIES).format(inner), bare, bare.lower()])


def _in_other_words(draw: random.Random, page: Page) -> tuple[str, str]:
    fact = draw.randrange(len(page.questions))
    return page.questions[fact].text, page.paraphrased[fact].text


def _of_another(draw: random.Random, page: Page, by_noun: dict[str, list[Page]]) -> tuple[str, str]:
    siblings = [
        sibling for sibling in by_noun[page.document_id.partition("-")[0]] if sibling is not page
    ]
    sibling, fact = draw.choice(siblings), draw.randrange(len(page.questions))
    forms = draw.choice([sibling.questions, sibling.paraphrased])
    return page.questions[fact].text, forms[fact].text


def _other_fact(draw: random.Random, page: Page) -> tuple[str, str]:
    first_fact, second_fact = draw.sample(range(len(page.questions)), 2)
    forms = draw.choice([page.questions, page.paraphrased])
    return page.questions[first_fact].text, forms[second_fact].text


def measure(
    embed: Callable[[Sequence[str]], Vector], *, pages: int = 240, count: int = 4_000, seed: int = 7
) -> dict[str, Any]:
    """Return false hits among different questions and hits among same ones, by threshold, with and
    without the guard. `embed` returns vectors of length 1.
    """
    pairs = [*draw_pairs(pages, count, seed=seed), *by_hand()]
    texts = sorted({text for pair in pairs for text in (pair.first, pair.second)})
    row_of = {text: row for row, text in enumerate(texts)}
    vectors = embed(texts)
    first_rows, second_rows = (
        [row_of[getattr(pair, field)] for pair in pairs] for field in ("first", "second")
    )
    similarities = np.sum(vectors[first_rows] * vectors[second_rows], axis=1)
    guarded = np.array([asks_the_same(pair.first, pair.second) for pair in pairs])
    rows = [
        _row(pairs, hits, threshold, with_guard)
        for with_guard in (False, True)
        for threshold in THRESHOLDS
        for hits in [(similarities >= threshold) & (guarded | (not with_guard))]
    ]
    return {"pairs": dict(Counter(pair.kind for pair in pairs)), "seed": seed, "rows": rows}


def _row(
    pairs: Sequence[QuestionPair], hits: Any, threshold: float, with_guard: bool
) -> dict[str, Any]:
    false = [hit for pair, hit in zip(pairs, hits, strict=True) if not pair.is_same]
    low, high = interval(int(sum(false)), len(false))
    by_kind = {kind: round(float(np.mean(flags)), 4) for kind, flags in _by_kind(pairs, hits)}
    return {
        "threshold": threshold,
        "guard": with_guard,
        "false_hits": int(sum(false)),
        "different": len(false),
        "false_share": sum(false) / len(false),
        "interval": (low, high),
        "share_by_kind": by_kind,
    }


def _by_kind(pairs: Sequence[QuestionPair], hits: Any) -> Iterator[tuple[str, list[bool]]]:
    for kind in sorted({pair.kind for pair in pairs}):
        yield kind, [bool(hit) for pair, hit in zip(pairs, hits, strict=True) if pair.kind == kind]


def interval(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share of `count` in `total`."""
    share, z2 = count / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)
