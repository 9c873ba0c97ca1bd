"""A device holds copies of what lives only."""

import numpy as np

from tests.workers.vector.cuda.batch_searches import EFFORTS, SIZES, run, searches
from tests.workers.vector.data import clustered_index, gaussian
from tests.workers.vector.traversal.reference import Reference
from workers.vector.cuda.batch import DeviceBatch
from workers.vector.cuda.device import Device
from workers.vector.filters.filters import EqualFilter
from workers.vector.index import plans
from workers.vector.index.query import Effort
from workers.vector.traversal import fields


def test_batch_frees_copies_of_dead_views(device: Device) -> None:
    index, batch = clustered_index(1_200), DeviceBatch(device, SIZES)
    first = searches(index.view(), EFFORTS[1], 1, scanned_rows_max=0)
    run(batch, first)
    copies_before = len(batch.copies)
    index.upsert([9_000], gaussian(1, 20))
    index.upsert([9_001], gaussian(1, 20, seed=8))  # beside the first: vectors have grown in place
    second = searches(index.view(), Effort(k=3, top_m=32), 1, scanned_rows_max=0)
    assert run(batch, second)[0][0] == Reference(second[0]).run()[0].tobytes()
    del first, second, index
    assert len(batch.copies) < copies_before


def test_device_copies_share_row_between_like_searches(device: Device) -> None:
    """A lane makes the row once, not for every search."""
    index, batch = clustered_index(1_200), DeviceBatch(device, SIZES)
    first, second = searches(index.view(), EFFORTS[1], 2, scanned_rows_max=0)
    row = batch.copies.shared_row(first)
    assert batch.copies.shared_row(second) is row
    assert row.tobytes() == batch.copies.row(first.plan.row, first).tobytes()
    filtered = searches(index.view(), Effort(k=3, where=EqualFilter("part", 3)), 1)[0]
    assert batch.copies.shared_row(filtered)[fields.ALLOWED] not in (0, row[fields.ALLOWED])
    index.upsert([9_000], gaussian(1, 20))
    later = searches(index.view(), EFFORTS[1], 1, scanned_rows_max=0)[0]
    assert batch.copies.shared_row(later)[fields.LOOSE_LAST] == row[fields.LOOSE_LAST] + 1
    for top_m in range(20, 96):  # more ways than are remembered
        batch.copies.shared_row(
            plans.search_of(Effort(k=1, top_m=top_m), first.query, index.view())
        )
    assert np.array_equal(batch.copies.shared_row(first), row)
