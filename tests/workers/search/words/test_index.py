"""The word index against BM25 written down, before and after changes, in many scripts."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from workers.search.words import index as module
from workers.search.words.index import AllowedPassages, WordIndex, listed_or_none
from workers.search.words.terms import query_terms, terms_of

WORDS = [f"w{each}" for each in range(60)] + ["渡轮码头", "Straße", "كتاب", "⛴"]


def drawn(count: int, seed: int = 7) -> dict[bytes, str]:
    """Passages of words that are as frequent as in a language."""
    random_ = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    lengths = (random_.randint(3, 30) for _ in range(count))
    return {
        f"d{at}#0".encode(): " ".join(random_.choices(WORDS, weights, k=length))
        for at, length in enumerate(lengths)
    }


def kept_length(terms: int) -> int:
    """As the library keeps a passage's length: in one byte, so long ones are rounded down."""
    lengths = list(range(41))
    while lengths[-1] < terms:
        lengths.append(lengths[-1] + (2 << (len(lengths) - 41) // 8))
    return max(each for each in lengths if each <= terms)


def scores(texts: Mapping[bytes, str], query: str) -> dict[bytes, float]:
    """BM25 of every passage."""
    counts = {each: Counter(terms_of(text)) for each, text in texts.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts)
    found: dict[bytes, float] = {}
    for term in query_terms(query):
        having = [each for each, count in counts.items() if term in count]
        idf = math.log(1 + (len(counts) - len(having) + 0.5) / (len(having) + 0.5))
        for each in having:
            length = 0.25 + 0.75 * kept_length(counts[each].total()) / mean
            tf = counts[each][term]
            found[each] = found.get(each, 0) + idf * tf * 2.2 / (tf + 1.2 * length)
    return found


def checked(index: WordIndex, texts: Mapping[bytes, str], query: str, depth: int) -> None:
    exact = scores(texts, query)
    best = sorted(exact.values(), reverse=True)[:depth]
    found = index.search(query, depth)
    assert [score for _, score in found] == pytest.approx(best, abs=1e-3)
    for each, score in found:
        assert score == pytest.approx(exact[each], abs=1e-3)


def test_scores_are_bm25_and_equal_ones_go_by_id() -> None:
    texts, index = drawn(300), WordIndex()
    index.change((), texts)
    for query in ("w3 w9 w40", "w0", "渡轮 w5", "strasse", "كِتاب", "⛴ w1"):
        checked(index, texts, query, 20)
    alike = {f"{at}#0".encode(): "the same words" for at in reversed(range(200))}
    other = WordIndex()
    other.change((), alike)
    assert [each for each, _ in other.search("words", 5)] == sorted(alike)[:5]
    assert other.search("unknown", 5) == other.search("!", 5) == WordIndex().search("w1", 5) == []


def test_what_is_changed_is_found_at_once_and_compacted_to_the_same() -> None:
    texts, index = drawn(200), WordIndex()
    for at in range(0, 200, 50):
        index.change((), dict(list(texts.items())[at : at + 50]))
    gone = list(texts)[::3]
    later = drawn(120, seed=8)
    index.change(gone, later)
    now = {each: text for each, text in texts.items() if each not in gone} | later
    assert WordIndex().dead_share == 0, "upkeep looked through all ids all the time"
    assert len(index) == len(now) and index.dead_share > 0.2
    found = {each for each, _ in index.search("w0 w1 w2", 500)}
    assert found == scores(now, "w0 w1 w2").keys(), "nothing that is gone, all that is there"
    index.compact(now)
    assert index.dead_share == 0.0
    fresh = WordIndex()
    fresh.change((), dict(sorted(now.items())))
    for query in ("w3 w9 w40", "w0", "渡轮 w5"):
        checked(index, now, query, 20)
        assert index.search(query, 20) == fresh.search(query, 20)
    index.change(now, {})
    assert len(index) == 0 and index.search("w0", 5) == []


def test_a_filter_is_filled_up_however_few_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, index = drawn(2_000), WordIndex()
    index.change((), texts)
    ranked = [each for each, _ in index.search("w0 w1", 2_000)]
    tests: list[Callable[[bytes], bool]] = [
        lambda each: hash(each) % 2 == 0,
        lambda each: each in ranked[-7:],
        lambda each: False,
    ]
    for holds in tests:
        wanted = [each for each in ranked if holds(each)][:10]
        allowed = [each for each in texts if holds(each)]
        for most in (0, 2_000):
            monkeypatch.setattr(module, "_LISTED_MAX", most)
            listed = listed_or_none(len(allowed), lambda: allowed)  # noqa: B023  # called at once
            found = index.search("w0 w1", 10, AllowedPassages(holds, listed))
            assert [each for each, _ in found] == wanted


def test_long_searches_keep_their_rarest_terms() -> None:
    texts, index = drawn(300), WordIndex()
    index.change((), {**texts, b"rare#0": "zebra"})
    query = " ".join([f"w{each}" for each in range(60)] + [f"x{each}" for each in range(9)])
    assert b"rare#0" in {each for each, _ in index.search(query + " zebra", 400)}
