"""Versions of a graph: what a reader holds stays, the next is written beside it."""

import numpy as np
import pytest

from tests.workers.vector.data import gaussian, overlapping
from workers.vector.graph.build import components
from workers.vector.graph.versions import CHANGES_MAX, GraphVersion, GraphVersions
from workers.vector.index.index import Index
from workers.vector.index.view import IndexView
from workers.vector.kernels.arrays import Array, address_of

DEGREE = 4


def publish_version(versions: GraphVersions, value: int, *, added: int = 10) -> Array:
    """A version that is written: new rows, and every third of the others, get one value."""
    before = len(versions.newest.array)
    array, changed = versions.begin(before + added), np.arange(0, before, 3)
    array[before:] = array[changed] = value
    versions.publish(versions.seal(changed))
    return array


def stored(view: IndexView) -> tuple[bytes, bytes]:
    """What of a view lies in memory that grows."""
    assert view.codes is not None
    return view.graph.tobytes(), view.codes.codes.tobytes()


def test_graph_version_is_former_with_changes() -> None:
    versions = GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32)))
    expected = np.zeros((100, DEGREE), np.uint32)
    for value in range(1, 30):
        before = versions.newest.array.copy()
        publish_version(versions, value)
        expected = np.concatenate([before, np.full((10, DEGREE), value, np.uint32)])
        expected[: len(before) : 3] = value
        assert (versions.newest.array == expected).all()


def test_graph_versions_alternate_buffers_and_spare_readers() -> None:
    versions = GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32)))
    for value in range(3):  # until both have room
        publish_version(versions, value, added=1)
    places = []
    for value in range(4, 10):
        publish_version(versions, value, added=1)
        places.append(address_of(versions.newest.array))
    assert len(set(places)) == 2
    array, whole = versions.newest.array, versions.newest.array.tobytes()
    for value in range(10, 20):
        publish_version(versions, value, added=1)
        assert array.tobytes() == whole
        assert not np.shares_memory(array, versions.newest.array)


def test_graph_version_lists_rows_changed_since_earlier_ones() -> None:
    random = np.random.default_rng(0)
    versions, former_versions = (
        GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32))),
        list[GraphVersion](),
    )
    for value in range(1, 30):
        former_versions.append(versions.newest)
        before = len(versions.newest.array)
        changed = random.choice(before, 5, replace=False)
        for _ in range(1 + value % 2):  # one that is not published is not part of the line
            array = versions.begin(before + 3)
            array[before:] = array[changed] = value
            version = versions.seal(changed)
        versions.publish(version)
        for former in former_versions[-CHANGES_MAX:]:
            rows = version.since(former.number)
            assert rows is not None and len(rows) <= 8 * CHANGES_MAX
            unchanged_rows = np.setdiff1d(np.arange(len(former.array)), rows)
            assert (former.array[unchanged_rows] == version.array[unchanged_rows]).all()
            assert set(range(len(former.array), len(version.array))) <= set(rows.tolist())
        for former in former_versions[:-CHANGES_MAX]:
            assert version.since(former.number) is None
        assert version.lineage is former_versions[0].lineage


def test_graph_versions_forget_unpublished_version() -> None:
    versions = GraphVersions(GraphVersion(np.zeros((100, DEGREE), np.uint32)))
    for value in range(6):
        publish_version(versions, value, added=1)
        whole = versions.newest.array.tobytes()
        versions.begin(200)[:] = 99
        assert versions.newest.array.tobytes() == whole
    assert (publish_version(versions, 7) != 99).all()


@pytest.mark.parametrize("views_are_read", [False, True])
def test_linked_index_does_not_depend_on_readers(views_are_read: bool) -> None:
    vectors, _ = overlapping(4_000, 0, dim=64)
    index = Index.build(vectors[:3_000], degree=16, threads=1)
    index.upsert(range(3_000, 4_000), vectors[3_000:])
    views, copies = [], []
    while index.loose:
        index.link(batch=100)
        if views_are_read:
            views.append(index.view())
            copies.append(stored(views[-1]))
    assert [stored(view) for view in views] == copies
    expected = Index.build(vectors[:3_000], degree=16, threads=1)
    expected.upsert(range(3_000, 4_000), vectors[3_000:])
    while expected.link(batch=100):
        pass
    assert expected.graph.tobytes() == index.graph.tobytes()
    roots = components(index.graph)
    assert set(roots) == set(roots[index.entries])


def test_linking_gives_island_of_new_rows_entry_point() -> None:
    index = Index.build(gaussian(3_000, 8), degree=16)
    far = np.concatenate([50 + gaussian(40, 8, seed=1), -50 + gaussian(40, 8, seed=2)])
    index.upsert([f"far {i}" for i in range(80)], far)
    index.link()
    roots = components(index.graph)
    assert set(roots) == set(roots[index.entries])
