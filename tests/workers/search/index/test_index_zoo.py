"""Floors of recall on kinds of data that graph searches fail on, on new kinds drawn by seed, and
behind filters that exclude what is near the query."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from infra.bench.search.zoo import kinds as zoo
from infra.bench.search.zoo import random_kinds, truth
from tests.workers.search.data import gaussian, nearest, overlapping, recall
from workers.search.graph import knn
from workers.search.index import audit, plans, snapshot
from workers.search.index.index import Index
from workers.search.index.query import Effort
from workers.search.kernels.metrics import Metric
from workers.search.metadata.filters import RangeFilter

USUAL = Effort(k=10, top_m=64)


ROWS, QUERIES = 6_000, 100
FLOOR = 0.95


def measured(kind: zoo.DataKind, top_m: Sequence[int] = (64,)) -> list[float]:
    """Recall on a small version of a kind, at each effort."""
    vectors, queries = kind.draw(ROWS, QUERIES)
    limits = truth.farthest(vectors, queries, 10, kind.metric)
    index = Index.build(vectors, metric=kind.metric)
    found = [index.search(queries, Effort(k=10, top_m=each))[0] for each in top_m]
    return [truth.recall(vectors, queries, rows, limits, kind.metric) for rows in found]


@pytest.mark.parametrize("name", zoo.KINDS)
def test_recall_on_every_kind_of_the_zoo(name: str) -> None:
    """Spread by distance alone, entry points found 0.16 to 0.95."""
    assert measured(zoo.KINDS[name])[0] >= FLOOR


@pytest.mark.parametrize("name", ["many_scales", "copies", "equal_features", "mixture"])
def test_recall_of_graphs_that_are_built_as_large_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NN-descent, whose lists are not exact."""
    monkeypatch.setattr(knn, "EXACT_ROWS_MAX", 2_000)
    assert measured(zoo.KINDS[name])[0] >= FLOOR


@pytest.mark.parametrize("seed", range(6, 18))
def test_recall_on_kinds_that_nobody_chose(seed: int) -> None:
    """With the usual effort, and with four times as much."""
    usual, more = measured(random_kinds.random_kind(seed), (64, 256))
    assert usual >= FLOOR
    assert more >= 0.98


def test_filters_that_exclude_what_is_near() -> None:
    """Hits that a walk met by chance, far from the query, were returned as if they were the
    nearest."""
    vectors, queries = overlapping(12_000, 200, dim=32)
    place = np.argsort(np.argsort(vectors @ vectors[0])) / len(vectors)
    index = Index.build(vectors, metadata=[{"place": float(each)} for each in place])
    beyond = queries[np.argsort(queries @ vectors[0])[-60:]]
    for share in (0.4, 0.55, 0.9):
        effort = Effort(k=10, top_m=64, where=RangeFilter("place", None, share))
        found, _ = index.search(beyond, effort)
        assert (place[found] <= share).all()
        assert recall(found, nearest(vectors, beyond, 10, place <= share)) >= 0.95


def test_deleted_neighbourhoods_do_not_hide_what_lies_beyond() -> None:
    """A walk whose routing list is full of deleted rows is a scan in the end."""
    vectors, _ = overlapping(6_000, 0)
    index = Index.build(vectors)
    close = nearest(vectors, vectors[:1], 900)[0]
    index.delete(close.tolist())
    allowed = np.ones(len(vectors), bool)
    allowed[close] = False
    found, _ = index.search(vectors[:1], USUAL)
    assert recall(found, nearest(vectors, vectors[:1], 10, allowed)) == 1


def test_a_filter_is_scanned_or_walked_by_what_costs_less() -> None:
    """Scanned are few rows, and those that no routing list would hold enough of."""
    vectors, _ = overlapping(8_000, 0, dim=16)
    metadata = [{"place": i} for i in range(len(vectors))]
    view = Index.build(vectors, metadata=metadata, degree=16).view()
    found = {}
    for allowed in (0, 100, 2_000, 5_000, 7_600):
        effort = Effort(k=10, where=RangeFilter("place", 0, allowed - 1))
        found[allowed] = plans.plan_search(effort, view)
    assert [way.exact for way in found.values()] == [True, True, True, False, False]
    crowded = Effort(k=100, where=RangeFilter("place", 0, 7_599))
    assert not plans.plan_search(crowded, view, plans.SearchLimits(top_m_max=211)).exact
    assert plans.plan_search(crowded, view, plans.SearchLimits(top_m_max=210)).exact


def islands(count: int, rows: int) -> np.ndarray:
    """Clusters far apart, one after the other, shape (count * rows, 24)."""
    centres = 50 * gaussian(count, 24, seed=count)
    return np.repeat(centres, rows, axis=0) + gaussian(count * rows, 24, seed=rows)


def test_what_is_added_is_audited_when_it_is_much() -> None:
    """Rows that come later lie on islands of their own."""
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


def test_an_audit_mends_what_it_finds_and_says_what_is_left() -> None:
    """Entry points that lie in one corner: the others are found, and the share goes down."""
    index = Index.build(islands(60, 50), degree=16)
    index.links.entries = np.arange(3)
    index._publish_view()
    before = index.missed_share()
    assert before > 0.8
    entries, found = audit.audit_index(index.view(), index.neighbours, seed=1)
    assert len(entries) >= 60
    assert found.rounds >= 2
    assert found.missed_share <= audit.ENOUGH


def test_nearest_rows_that_held_out_ones_miss_become_entry_points_where_that_helps() -> None:
    """Narrow clusters inside of wide ones: what a query of a wide one is nearest to lies at the rim
    of a narrow one, where hardly any edge leads. In noise there are no better entry points."""
    for vectors, helps in ((zoo.close_scales(4_000, 0)[0], True), (gaussian(2_000, 200), False)):
        index = Index.build(vectors, degree=16)
        index.links.entries = np.arange(0, len(vectors), 50)
        index._publish_view()
        random = np.random.default_rng(0)
        nearest_of = audit.build_nearest_of(index.view(), index.neighbours)
        entries = audit.extend_entries(index.view(), index.neighbours, nearest_of, random)
        held = audit.HeldOutRows.draw(index.view(), nearest_of, random, 200, 10)
        shares = [held.recall(index.neighbours, each) for each in (index.entries, entries)]
        assert (len(entries) > len(index.entries)) == helps
        assert shares[0] < 0.9
        assert shares[1] >= (0.95 if helps else shares[0])


def test_the_audit_is_kept_in_snapshots_and_shown(tmp_path: Path) -> None:
    """`trivium index info` shows the header."""
    index = Index.build(islands(30, 70), degree=16, metric=Metric.COSINE)
    assert index.audit is not None and index.audit.efforts
    snapshot.save(index, tmp_path / "index")
    header = snapshot.info(tmp_path / "index")
    assert header["audit"]["missed_share"] == index.audit.missed_share
    assert snapshot.load(tmp_path / "index").audit == index.audit
