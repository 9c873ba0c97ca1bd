"""Where searches may begin."""

import numpy as np

from tests.workers.vector.data import separated
from workers.vector.graph import build, entry_points
from workers.vector.index.index import Index


def test_entry_points_cover_every_component() -> None:
    vectors, _ = separated(4_000, 0, clusters=150, dim=16)
    index = Index.build(vectors, degree=8)
    roots = build.components(index.graph)
    assert len(np.unique(roots)) >= 100
    assert set(roots) == set(roots[index.entries])
    assert len(index.entries) >= entry_points.usual_count(4_000, 16)
    assert (np.diff(index.entries) > 0).all()
