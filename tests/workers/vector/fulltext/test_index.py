"""The word index against BM25 written down, before and after changes, in many scripts."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from workers.vector.fulltext import index as module
from workers.vector.fulltext.index import AllowedPassages, WordIndex, listed_or_none
from workers.vector.fulltext.terms import query_terms, terms_of

WORDS = [f"w{number}" for number in range(60)] + ["渡轮码头", "Straße", "كتاب", "⛴"]


def random_passages(count: int, seed: int = 7) -> dict[bytes, str]:
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
    return max(length for length in lengths if length <= terms)


def scores(texts: Mapping[bytes, str], query: str) -> dict[bytes, float]:
    """BM25 of every passage."""
    counts = {passage_id: Counter(terms_of(text)) for passage_id, text in texts.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts)
    scores_by_id: dict[bytes, float] = {}
    for term in query_terms(query):
        having = [passage_id for passage_id, count in counts.items() if term in count]
        idf = math.log(1 + (len(counts) - len(having) + 0.5) / (len(having) + 0.5))
        for passage_id in having:
            length = 0.25 + 0.75 * kept_length(counts[passage_id].total()) / mean
            tf = counts[passage_id][term]
            scores_by_id[passage_id] = scores_by_id.get(passage_id, 0) + idf * tf * 2.2 / (
                tf + 1.2 * length
            )
    return scores_by_id


def checked(index: WordIndex, texts: Mapping[bytes, str], query: str, depth: int) -> None:
    exact = scores(texts, query)
    best = sorted(exact.values(), reverse=True)[:depth]
    hits = index.search(query, depth)
    assert [score for _, score in hits] == pytest.approx(best, abs=1e-3)
    for passage_id, score in hits:
        assert score == pytest.approx(exact[passage_id], abs=1e-3)


def test_word_index_scores_by_bm25_and_orders_ties_by_id() -> None:
    texts, index = random_passages(300), WordIndex()
    index.change((), texts)
    for query in ("w3 w9 w40", "w0", "渡轮 w5", "strasse", "كِتاب", "⛴ w1"):
        checked(index, texts, query, 20)
    tied_texts = {f"{at}#0".encode(): "the same words" for at in reversed(range(200))}
    tied_index = WordIndex()
    tied_index.change((), tied_texts)
    assert [passage_id for passage_id, _ in tied_index.search("words", 5)] == sorted(tied_texts)[:5]
    assert (
        tied_index.search("unknown", 5)
        == tied_index.search("!", 5)
        == WordIndex().search("w1", 5)
        == []
    )


def test_word_index_shows_changes_at_once_and_after_compaction() -> None:
    texts, index = random_passages(200), WordIndex()
    for at in range(0, 200, 50):
        index.change((), dict(list(texts.items())[at : at + 50]))
    deleted_ids = list(texts)[::3]
    later = random_passages(120, seed=8)
    index.change(deleted_ids, later)
    now = {
        passage_id: text for passage_id, text in texts.items() if passage_id not in deleted_ids
    } | later
    assert WordIndex().dead_share == 0, "upkeep looked through all ids all the time"
    assert len(index) == len(now) and index.dead_share > 0.2
    ids = {passage_id for passage_id, _ in index.search("w0 w1 w2", 500)}
    assert ids == scores(now, "w0 w1 w2").keys(), "nothing that is gone, all that is there"
    index.compact(now)
    assert index.dead_share == 0.0
    fresh = WordIndex()
    fresh.change((), dict(sorted(now.items())))
    for query in ("w3 w9 w40", "w0", "渡轮 w5"):
        checked(index, now, query, 20)
        assert index.search(query, 20) == fresh.search(query, 20)
    index.change(now, {})
    assert len(index) == 0 and index.search("w0", 5) == []


def test_word_search_fills_results_under_any_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, index = random_passages(2_000), WordIndex()
    index.change((), texts)
    ranked = [passage_id for passage_id, _ in index.search("w0 w1", 2_000)]
    tests: list[Callable[[bytes], bool]] = [
        lambda passage_id: hash(passage_id) % 2 == 0,
        lambda passage_id: passage_id in ranked[-7:],
        lambda passage_id: False,
    ]
    for holds in tests:
        expected = [passage_id for passage_id in ranked if holds(passage_id)][:10]
        allowed = [passage_id for passage_id in texts if holds(passage_id)]
        for listed_max in (0, 2_000):
            monkeypatch.setattr(module, "_LISTED_MAX", listed_max)
            listed = listed_or_none(len(allowed), lambda: allowed)  # noqa: B023  # called at once
            hits = index.search("w0 w1", 10, AllowedPassages(holds, listed))
            assert [passage_id for passage_id, _ in hits] == expected


def test_long_query_keeps_rarest_terms() -> None:
    texts, index = random_passages(300), WordIndex()
    index.change((), {**texts, b"rare#0": "zebra"})
    query = " ".join([f"w{number}" for number in range(60)] + [f"x{number}" for number in range(9)])
    assert b"rare#0" in {passage_id for passage_id, _ in index.search(query + " zebra", 400)}
