"""Effort by target: how long a routing list must be for a recall, by rows that are held out."""

from dataclasses import replace

import numpy as np
import pytest

from infra.bench.search.zoo import kinds, random_kinds, truth
from schemas.errors import InvalidRequest
from tests.workers.vector.data import gaussian, overlapping
from workers.vector.index import audit, plans
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.index.view import UNCALIBRATED, IndexAudit, IndexView
from workers.vector.kernels.arrays import Array, all_but
from workers.vector.kernels.metrics import Metric
from workers.vector.limits import TOP_M_MAX

WITHIN = 0.02
SOME = ("overlapping", "many_copies_of_few", "log_normal_norms", "heavy_tails", "mixture")


@pytest.mark.parametrize("name", [*SOME, "drawn 1", "drawn 6", "drawn 9"])
def test_index_meets_target_recall(name: str) -> None:
    """Queries are new to the index, which measured list lengths with rows of its own."""
    kind = (
        random_kinds.random_kind(int(name[6:])) if name.startswith("drawn") else kinds.KINDS[name]
    )
    vectors, queries = kind.draw(6_000, 300)
    limits = truth.farthest(vectors, queries, 10, kind.metric)
    index = Index.build(vectors, metric=kind.metric)
    for aim in (0.9, 0.95):
        effort = Effort(k=10, recall=aim)
        rows, _ = index.search(queries, effort)
        assert truth.recall(vectors, queries, rows, limits, kind.metric) >= aim - WITHIN
        assert plans.plan_search(effort, index.view()).top_m <= 128, "no more than is needed"


@pytest.mark.parametrize("metric", [Metric.SQEUCLIDEAN, Metric.INNER_PRODUCT])
@pytest.mark.parametrize("dim", [5, 48, 72])
def test_audit_neighbours_equal_scan(dim: int, metric: Metric) -> None:
    """Panels compare few rows; products, which read rows once for many queries, compare many."""
    index = Index.build(overlapping(3_000, 0, dim)[0], metric=metric, degree=16)
    view, rows = index.view(), np.arange(0, 3_000, 17)
    loose = replace(
        view, linked=0, graph=view.graph[:0], entries=view.entries[:0], chain=None, codes=None,
        plans={}, live=3_000 - len(rows), alive=all_but(rows, 3_000),
    )  # fmt: skip
    scanned = index.neighbours(loose, view.vectors[rows], Effort(k=100, top_m=100))
    for rows_max in (10_000, 0):
        neighbours = audit.build_nearest_of(view, index.neighbours, rows_max)(rows, 100)
        assert neighbours.tolist() == scanned.tolist()


def test_hard_data_get_longer_lists_than_easy_data() -> None:
    """Lists exceed 512 entries where 512 are not enough."""
    easy = Index.build(overlapping(3_000, 0, dim=8)[0], degree=16).view()
    hard = Index.build(gaussian(6_000, 400), degree=8).view()
    lengths = [plans.plan_search(Effort(recall=0.99), view).top_m for view in (easy, hard)]
    assert lengths[0] <= 64
    assert lengths[1] > 512


def test_audit_measures_lists_again_after_growth() -> None:
    """Hard rows follow easy ones: the same recall needs a longer list."""
    index = Index.build(overlapping(4_000, 0, dim=64)[0] * np.float32(0.01), degree=16)
    before = plans.plan_search(Effort(recall=0.95), index.view()).top_m
    index.upsert(range(10_000, 13_000), gaussian(3_000, 64))
    while index.loose:
        index.link()
    assert index.audit is not None and index.audit.calibrated == 7_000
    assert plans.plan_search(Effort(recall=0.95), index.view()).top_m > before


def test_audit_interpolates_list_lengths() -> None:
    efforts = ((16, 0.9, 0.0), (64, 0.99, 0.0), (128, 0.999, 0.9))
    index_audit = IndexAudit(
        rows=1, entries=1, rounds=1, missed_share=0.0, calibrated=1, efforts=efforts
    )
    assert [index_audit.top_m(recall, 10, 512) for recall in (0.5, 0.9, 0.99)] == [16, 16, 64]
    assert index_audit.top_m(1 - 10**-1.5, 10, 512) == 32
    assert index_audit.top_m(0.9999, 10, 512) == 128
    assert [index_audit.top_m(0.9, k, 512) for k in (100, 200, 500)] == [128, 256, 512]


def test_audit_tries_longer_lists_only_on_missed_queries() -> None:
    index, query_counts = Index.build(gaussian(5_000, 32), degree=8), dict[int, int]()

    def neighbours(view: IndexView, queries: Array, effort: Effort) -> Array:
        query_counts[effort.top_m] = len(queries)
        return index.neighbours(view, queries, effort)

    view, random = index.view(), np.random.default_rng(0)
    held_out_rows = audit.HeldOutRows.draw(
        view, audit.build_nearest_of(view, neighbours), random, 200, 100
    )
    efforts = audit.measure_recalls(held_out_rows, neighbours, view.entries)
    counts = [query_counts[length] for length, *_ in efforts]
    assert counts[:4] == [200] * 4
    assert counts[4:] == sorted(counts[4:], reverse=True)
    assert counts[-1] < 200
    for length, recall_at_10, recall_at_100 in efforts[3:]:
        near = held_out_rows.are_near(
            held_out_rows.search(index.neighbours, view.entries, 100, length)
        )
        assert abs(near.mean() - recall_at_100) <= 0.002
        near = held_out_rows.are_near(
            held_out_rows.search(index.neighbours, view.entries, 10, length)
        )
        assert abs(near.mean() - recall_at_10) <= 0.002


def test_uncalibrated_index_uses_one_list_length() -> None:
    index = Index.build(gaussian(1_400, 8), degree=8)
    assert index.audit is not None and index.audit.efforts == ()
    assert plans.plan_search(Effort(recall=0.9), index.view()).top_m == UNCALIBRATED


def test_effort_rejects_recall_of_one() -> None:
    index = Index.build(gaussian(50, 8))
    with pytest.raises(InvalidRequest, match="expected recall from 0 to below 1, found 1"):
        index.search(gaussian(1, 8), Effort(recall=1))


def test_search_allows_longest_routing_list() -> None:
    vectors = gaussian(3_000, 16)
    index = Index.build(vectors, degree=8)
    rows, _ = index.search(vectors[:20], Effort(k=1, top_m=TOP_M_MAX))
    assert rows[:, 0].tolist() == list(range(20))
