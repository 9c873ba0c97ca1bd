"""Drops tasks that are too far for their slot's lists by their codes (`kernels/codes.py`)."""

from workers.vector.kernels.codes import prefilter
from workers.vector.kernels.jit import inlined
from workers.vector.kernels.keys import LIMIT, distance_of
from workers.vector.kernels.memory import get_i64, get_u64
from workers.vector.limits import TASKS_MAX
from workers.vector.traversal import fields

CODED_QUERY = 8 * TASKS_MAX  # offset of the coded query behind a slot's tasks, in bytes


@inlined
def prefilter_tasks(
    f: int, keys: int, hits: int, size: int, tasks: int, total: int, codes: int
) -> int:  # fmt: skip
    """Drop tasks that are too far by their codes; return the number of those left.

    `codes` is the field with the address of the codes; the next field has that of the outliers."""
    last = get_u64(keys, size - 1)
    if get_i64(f, fields.SCREENED):
        last = max(last, get_u64(hits, get_i64(f, fields.K) - 1))
    if last >= LIMIT:
        return total
    return prefilter(
        tasks, total, distance_of(last), get_i64(f, codes), get_i64(f, fields.CODE_BYTES),
        get_i64(f, codes + 1), tasks + CODED_QUERY, get_i64(f, fields.METRIC),
    )  # fmt: skip
