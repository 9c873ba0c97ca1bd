"""The index that tests of a device search."""

import pytest

from tests.workers.vector.data import clustered_index, gaussian
from workers.vector.index.view import IndexView


@pytest.fixture(scope="module")
def view() -> IndexView:
    """Walked, with deleted rows and rows that are not linked yet."""
    index = clustered_index()
    index.delete(range(0, 3_000, 7))
    index.upsert(range(5_000, 5_200), gaussian(200, 20), [{"part": 3}] * 200)
    return index.view()
