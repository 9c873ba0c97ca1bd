"""Pairs of questions, and what is counted over them."""

from collections.abc import Sequence

import numpy as np
import pytest

from infra.bench.retrieval.cache import by_hand, draw_pairs, interval, measure
from schemas.retrieval import Vector


def test_question_pairs_repeat_by_seed_and_match_their_kind() -> None:
    pairs = draw_pairs(60, 40)
    assert pairs == draw_pairs(60, 40) != draw_pairs(60, 40, seed=8)
    assert {(pair.kind, pair.is_same) for pair in pairs} == {
        ("spelling", True), ("words", True), ("other thing", False), ("other fact", False)
    }  # fmt: skip
    assert all(pair.first != pair.second for pair in [*pairs, *by_hand()])


def test_false_hits_count_only_different_questions() -> None:
    def blind(texts: Sequence[str]) -> Vector:
        return np.ones((len(texts), 1), np.float32)

    report = measure(blind, pages=24, count=20)
    bare = [row for row in report["rows"] if not row["guard"]]
    guarded = [row for row in report["rows"] if row["guard"]]
    different = sum(not pair.is_same for pair in by_hand()) + 40
    assert {row["different"] for row in report["rows"]} == {different}
    assert {row["false_hits"] for row in bare} == {different}
    assert {row["false_hits"] for row in guarded} == {0}
    assert {row["share_by_kind"]["spelling"] for row in guarded} == {1.0}
    assert {row["share_by_kind"]["words"] for row in bare} == {1.0}


def test_interval_contains_share() -> None:
    low, high = interval(0, 8_000)
    assert low == 0 and high == pytest.approx(0.00048, abs=1e-5)
    low, high = interval(50, 100)
    assert low < 0.5 < high and high - low == pytest.approx(0.19, abs=0.01)
