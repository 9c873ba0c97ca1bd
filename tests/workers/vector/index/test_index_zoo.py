"""Floors of recall on kinds of data that graph searches fail on, on new kinds drawn by seed, and
behind filters that exclude what is near the query."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from infra.bench.search.zoo import kinds as zoo
from infra.bench.search.zoo import random_kinds, truth
from tests.workers.vector.data import gaussian, nearest, overlapping, recall
from workers.vector.filters.filters import RangeFilter
from workers.vector.graph import knn
from workers.vector.index import audit, plans, snapshot
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.metrics import Metric

USUAL = Effort(k=10, top_m=64)


ROWS, QUERIES = 6_000, 100
FLOOR = 0.95


def measured(kind: zoo.DataKind, top_m: Sequence[int] = (64,)) -> list[float]:
    """Recall on a small version of a kind, at each effort."""
    vectors, queries = kind.draw(ROWS, QUERIES)
    limits = truth.farthest(vectors, queries, 10, kind.metric)
    index = Index.build(vectors, metric=kind.metric)
    rows_by_length = [index.search(queries, Effort(k=10, top_m=length))[0] for length in top_m]
    return [truth.recall(vectors, queries, rows, limits, kind.metric) for rows in rows_by_length]


@pytest.mark.parametrize("name", zoo.KINDS)
def test_index_reaches_recall_floor_on_every_zoo_kind(name: str) -> None:
    """Entry points that were spread by distance alone found 0.16 to 0.95."""
    assert measured(zoo.KINDS[name])[0] >= FLOOR


@pytest.mark.parametrize("name", ["many_scales", "copies", "equal_features", "mixture"])
def test_graph_built_like_large_one_reaches_recall_floor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NN-descent builds its lists, which are not exact."""
    monkeypatch.setattr(knn, "EXACT_ROWS_MAX", 2_000)
    assert measured(zoo.KINDS[name])[0] >= FLOOR


@pytest.mark.parametrize("seed", range(6, 18))
def test_index_reaches_recall_floor_on_random_kinds(seed: int) -> None:
    """Searches take the usual effort, and four times as much."""
    recall_at_64, recall_at_256 = measured(random_kinds.random_kind(seed), (64, 256))
    assert recall_at_64 >= FLOOR
    assert recall_at_256 >= 0.98


def test_filter_excluding_near_rows_keeps_recall() -> None:
    """A walk may not return chance hits far from the query as if they were the nearest."""
    vectors, queries = overlapping(12_000, 200, dim=32)
    place = np.argsort(np.argsort(vectors @ vectors[0])) / len(vectors)
    index = Index.build(vectors, metadata=[{"place": float(rank)} for rank in place])
    beyond = queries[np.argsort(queries @ vectors[0])[-60:]]
    for share in (0.4, 0.55, 0.9):
        effort = Effort(k=10, top_m=64, where=RangeFilter("place", None, share))
        rows, _ = index.search(beyond, effort)
        assert (place[rows] <= share).all()
        assert recall(rows, nearest(vectors, beyond, 10, place <= share)) >= 0.95


def test_search_finds_rows_beyond_deleted_neighbourhood() -> None:
    """A walk whose routing list is full of deleted rows ends as a scan."""
    vectors, _ = overlapping(6_000, 0)
    index = Index.build(vectors)
    close = nearest(vectors, vectors[:1], 900)[0]
    index.delete(close.tolist())
    allowed = np.ones(len(vectors), bool)
    allowed[close] = False
    rows, _ = index.search(vectors[:1], USUAL)
    assert recall(rows, nearest(vectors, vectors[:1], 10, allowed)) == 1


def test_plan_scans_or_walks_filtered_rows_by_cost() -> None:
    """Few rows are scanned, and those that no routing list would hold enough of."""
    vectors, _ = overlapping(8_000, 0, dim=16)
    metadata = [{"place": i} for i in range(len(vectors))]
    view = Index.build(vectors, metadata=metadata, degree=16).view()
    plan_of = {}
    for allowed in (0, 100, 2_000, 5_000, 7_600):
        effort = Effort(k=10, where=RangeFilter("place", 0, allowed - 1))
        plan_of[allowed] = plans.plan_search(effort, view)
    assert [way.exact for way in plan_of.values()] == [True, True, True, False, False]
    crowded = Effort(k=100, where=RangeFilter("place", 0, 7_599))
    assert not plans.plan_search(crowded, view, plans.SearchLimits(top_m_max=211)).exact
    assert plans.plan_search(crowded, view, plans.SearchLimits(top_m_max=210)).exact


def islands(count: int, rows: int) -> np.ndarray:
    """Clusters far apart, one after the other, shape (count * rows, 24)."""
    centres = 50 * gaussian(count, 24, seed=count)
    return np.repeat(centres, rows, axis=0) + gaussian(count * rows, 24, seed=rows)


def test_index_audits_large_additions() -> None:
    """Later rows lie on islands of their own."""
    index = Index.build(islands(30, 100), degree=16)
    first = index.audit
    assert first is not None
    assert first.rows == 3_000
    index.upsert(range(5_000, 5_400), islands(4, 100))
    while index.loose:
        index.link()
    assert index.audit is not None and index.audit.rows == 3_400, "more than an eighth"
    index.upsert(range(10_000, 12_400), islands(80, 30))
    while index.loose:
        index.link()
    assert index.audit is not None
    assert index.audit.rows > 5_000
    assert index.missed_share() <= 0.02
    index.compact()
    assert index.missed_share() <= 0.02


def test_audit_adds_entry_points_and_reports_missed_share() -> None:
    """Entry points lie in one corner: the audit finds the others, and the share falls."""
    index = Index.build(islands(60, 50), degree=16)
    index.links.entries = np.arange(3)
    index._publish_view()
    before = index.missed_share()
    assert before > 0.8
    entries, index_audit = audit.audit_index(index.view(), index.neighbours, seed=1)
    assert len(entries) >= 60
    assert index_audit.rounds >= 2
    assert index_audit.missed_share <= audit.ENOUGH


def test_audit_adds_entry_points_only_where_recall_improves() -> None:
    """Wide clusters hold narrow ones: few edges lead to rims; noise has no better entries."""
    for vectors, helps in ((zoo.close_scales(4_000, 0)[0], True), (gaussian(2_000, 200), False)):
        index = Index.build(vectors, degree=16)
        index.links.entries = np.arange(0, len(vectors), 50)
        index._publish_view()
        random = np.random.default_rng(0)
        nearest_of = audit.build_nearest_of(index.view(), index.neighbours)
        entries = audit.extend_entries(index.view(), index.neighbours, nearest_of, random)
        held_out_rows = audit.HeldOutRows.draw(index.view(), nearest_of, random, 200, 10)
        shares = [
            held_out_rows.recall(index.neighbours, entry_rows)
            for entry_rows in (index.entries, entries)
        ]
        assert (len(entries) > len(index.entries)) == helps
        assert shares[0] < 0.9
        assert shares[1] >= (0.95 if helps else shares[0])


def test_snapshot_keeps_audit(tmp_path: Path) -> None:
    """`trivium index info` shows the header."""
    index = Index.build(islands(30, 70), degree=16, metric=Metric.COSINE)
    assert index.audit is not None and index.audit.efforts
    snapshot.save(index, tmp_path / "index")
    header = snapshot.info(tmp_path / "index")
    assert header["audit"]["missed_share"] == index.audit.missed_share
    assert snapshot.load(tmp_path / "index").audit == index.audit
