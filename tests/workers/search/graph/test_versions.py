"""Versions of a graph: what a reader holds stays, the next is written beside it."""

import numpy as np
import pytest

from tests.workers.search.data import gaussian, overlapping
from workers.search.graph.build import components
from workers.search.graph.versions import CHANGES_MAX, GraphVersion, GraphVersions
from workers.search.index.index import Index
from workers.search.index.view import IndexView
from workers.search.kernels.arrays import Array, address_of

DEGREE = 4


def grown(versions: GraphVersions, value: int, *, added: int = 10) -> Array:
    """A version that is written: new rows, and every third of the others, get one value."""
    before = len(versions.newest.array)
    made, changed = versions.begin(before + added), np.arange(0, before, 3)
    made[before:] = made[changed] = value
    versions.publish(versions.seal(changed))
    return made


def stored(view: IndexView) -> tuple[bytes, bytes]:
    """What of a view lies in memory that grows."""
    assert view.codes is not None
    return view.graph.tobytes(), view.codes.codes.tobytes()


def test_each_version_is_the_former_with_what_was_changed() -> None:
    versions = GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32)))
    expected = np.zeros((100, DEGREE), np.uint32)
    for value in range(1, 30):
        before = versions.newest.array.copy()
        grown(versions, value)
        expected = np.concatenate([before, np.full((10, DEGREE), value, np.uint32)])
        expected[: len(before) : 3] = value
        assert (versions.newest.array == expected).all()


def test_two_buffers_take_turns_and_what_is_read_is_left_alone() -> None:
    versions = GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32)))
    for value in range(3):  # until both have room
        grown(versions, value, added=1)
    places = []
    for value in range(4, 10):
        grown(versions, value, added=1)
        places.append(address_of(versions.newest.array))
    assert len(set(places)) == 2
    held, whole = versions.newest.array, versions.newest.array.tobytes()
    for value in range(10, 20):
        grown(versions, value, added=1)
        assert held.tobytes() == whole
        assert not np.shares_memory(held, versions.newest.array)


def test_a_version_knows_in_which_rows_it_differs_from_earlier_ones() -> None:
    random = np.random.default_rng(0)
    versions, known = (
        GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32))),
        list[GraphVersion](),
    )
    for value in range(1, 30):
        known.append(versions.newest)
        before = len(versions.newest.array)
        changed = random.choice(before, 5, replace=False)
        for _ in range(1 + value % 2):  # one that is not published is not part of the line
            made = versions.begin(before + 3)
            made[before:] = made[changed] = value
            version = versions.seal(changed)
        versions.publish(version)
        for each in known[-CHANGES_MAX:]:
            rows = version.since(each.number)
            assert rows is not None and len(rows) <= 8 * CHANGES_MAX
            kept = np.setdiff1d(np.arange(len(each.array)), rows)
            assert (each.array[kept] == version.array[kept]).all()
            assert set(range(len(each.array), len(version.array))) <= set(rows.tolist())
        for each in known[:-CHANGES_MAX]:
            assert version.since(each.number) is None
        assert version.lineage is known[0].lineage


def test_a_version_that_is_never_published_leaves_no_trace() -> None:
    versions = GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32)))
    for value in range(6):
        grown(versions, value, added=1)
        whole = versions.newest.array.tobytes()
        versions.begin(200)[:] = 99
        assert versions.newest.array.tobytes() == whole
    assert (grown(versions, 7) != 99).all()


@pytest.mark.parametrize("held", [False, True])
def test_an_index_that_is_linked_in_batches_is_the_same_whoever_reads_it(held: bool) -> None:
    vectors, _ = overlapping(4_000, 0, dim=64)
    index = Index.build(vectors[:3_000], degree=16, threads=1)
    index.upsert(range(3_000, 4_000), vectors[3_000:])
    views, copies = [], []
    while index.loose:
        index.link(batch=100)
        if held:
            views.append(index.view())
            copies.append(stored(views[-1]))
    assert [stored(view) for view in views] == copies
    one = Index.build(vectors[:3_000], degree=16, threads=1)
    one.upsert(range(3_000, 4_000), vectors[3_000:])
    while one.link(batch=100):
        pass
    assert one.graph.tobytes() == index.graph.tobytes()
    roots = components(index.graph)
    assert set(roots) == set(roots[index.entries])


def test_an_island_of_new_rows_gets_an_entry_point() -> None:
    index = Index.build(gaussian(3_000, 8), degree=16)
    far = np.concatenate([50 + gaussian(40, 8, seed=1), -50 + gaussian(40, 8, seed=2)])
    index.upsert([f"far {i}" for i in range(80)], far)
    index.link()
    roots = components(index.graph)
    assert set(roots) == set(roots[index.entries])
