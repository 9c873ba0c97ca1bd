"""A device holds copies of what lives only."""

from tests.workers.search.cuda.running import EFFORTS, SIZES, run, searches
from tests.workers.search.data import clustered_index, gaussian
from tests.workers.search.walk.reference import Reference
from workers.search.cuda.batch import Batch
from workers.search.cuda.device import Device
from workers.search.index.query import Effort


def test_a_device_holds_copies_of_what_lives_only(device: Device) -> None:
    index, batch = clustered_index(1_200), Batch(device, SIZES)
    first = searches(index.view(), EFFORTS[1], 1, scanned_rows_max=0)
    run(batch, first)
    known = len(batch.copies)
    index.upsert([9_000], gaussian(1, 20))
    index.upsert([9_001], gaussian(1, 20, seed=8))  # beside the first: vectors have grown in place
    second = searches(index.view(), Effort(k=3, top_m=32), 1, scanned_rows_max=0)
    assert run(batch, second)[0][0] == Reference(second[0]).run()[0].tobytes()
    del first, second, index
    assert len(batch.copies) < known
