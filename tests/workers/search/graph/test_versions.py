"""Versions of a graph: what a reader holds stays, the next is written beside it (issue 15, 2.3)."""

import numpy as np
import pytest

from tests.workers.search.data import gaussian, overlapping
from workers.search.graph.build import components
from workers.search.graph.versions import Versions
from workers.search.index.index import Index
from workers.search.index.view import IndexView
from workers.search.kernels.arrays import Array, address_of

DEGREE = 4


def grown(versions: Versions, value: int, *, added: int = 10) -> Array:
    """A version that is written: new rows, and every third of the others, get one value."""
    made = versions.begun(len(versions.newest) + added)
    changed = np.arange(0, len(versions.newest), 3)
    made[len(versions.newest) :] = value
    made[changed] = value
    versions.publish(made, changed)
    return made


def stored(view: IndexView) -> tuple[bytes, bytes]:
    """What of a view lies in memory that grows."""
    assert view.codes is not None
    return view.graph.tobytes(), view.codes.codes.tobytes()


def test_each_version_is_the_former_with_what_was_changed() -> None:
    versions = Versions(np.zeros((100, DEGREE), np.uint32))
    expected = np.zeros((100, DEGREE), np.uint32)
    for value in range(1, 30):
        before = versions.newest.copy()
        grown(versions, value)
        expected = np.concatenate([before, np.full((10, DEGREE), value, np.uint32)])
        expected[: len(before) : 3] = value
        assert (versions.newest == expected).all()


def test_two_buffers_take_turns_and_what_is_read_is_left_alone() -> None:
    versions = Versions(np.zeros((100, DEGREE), np.uint32))
    for value in range(3):  # until both have room
        grown(versions, value, added=1)
    places = []
    for value in range(4, 10):
        grown(versions, value, added=1)
        places.append(address_of(versions.newest))
    assert len(set(places)) == 2
    held, whole = versions.newest, versions.newest.tobytes()
    for value in range(10, 20):
        grown(versions, value, added=1)
        assert held.tobytes() == whole
        assert not np.shares_memory(held, versions.newest)


def test_a_version_that_is_never_published_leaves_no_trace() -> None:
    versions = Versions(np.zeros((100, DEGREE), np.uint32))
    for value in range(6):
        grown(versions, value, added=1)
        whole = versions.newest.tobytes()
        versions.begun(200)[:] = 99
        assert versions.newest.tobytes() == whole
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
