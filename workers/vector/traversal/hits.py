"""Maintains a search's list of hits if its routing list is not the result: filters and copies.

`steps.py` calls this. `f` is the address of a slot's row, `keys` of its routing list, and `hits` of
its row of `hit_keys`; both lists are uint64 keys, ascending.
"""

from typing import Any

from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.keys import (
    EMPTY,
    FLAG,
    LIMIT,
    NOWHERE,
    distance_of,
    insert,
    key_of,
    row_of,
)
from workers.vector.kernels.memory import get_i64, get_u32, get_u64, has_bit, put_u64
from workers.vector.traversal import fields


@inlined
def has_hit_list(f: int) -> bool:
    """Return whether an ended search has its hits in `hit_keys`, not in its routing list."""
    return bool(get_i64(f, fields.SCREENED) or get_i64(f, fields.CHAIN))


@kernel
def unfold(f: int, keys: int, hits: int) -> None:
    """Put the rows of the routing list and their copies into the hits, nearest first."""
    k, chain, count = get_i64(f, fields.K), get_i64(f, fields.CHAIN), 0
    for place in range(get_i64(f, fields.TOP_M)):
        key = get_u64(keys, place) & ~FLAG
        if key >= LIMIT or (count == k and key >= get_u64(hits, k - 1)):
            break
        while count < k or key < get_u64(hits, k - 1):
            at = min(count, k - 1)
            while at > 0 and get_u64(hits, at - 1) > key:  # copies of a row at the same distance
                put_u64(hits, at, get_u64(hits, at - 1))
                at -= 1
            put_u64(hits, at, key)
            count = min(count + 1, k)
            following = get_u32(chain, row_of(key))
            if following == NOWHERE:
                break
            key = key_of(distance_of(key), following)


@kernel
def drop_chance_hits(f: int, keys: int, hits: int) -> None:
    """Drop all hits if fewer than NEEDED are nearer than the routing list's end: chance hits."""
    needed = get_i64(f, fields.NEEDED)
    if needed and get_u64(hits, needed - 1) > get_u64(keys, get_i64(f, fields.TOP_M) - 1):
        for i in range(get_i64(f, fields.K)):
            put_u64(hits, i, EMPTY)


@inlined
def insert_hit(f: int, hits: int, k: int, key: Any, chain: int) -> None:
    """Insert a row into the hits, and its copies; `chain` is an address, 0: no copies.

    Copies have ascending keys, so the loop ends at the first that is too far."""
    while key < (get_u64(hits, k - 1) & ~FLAG):
        row = row_of(key)
        if _may_return(f, row):
            insert(hits, k, key)
        following: Any = get_u32(chain, row) if chain != 0 else NOWHERE
        if following == NOWHERE:
            break
        key = key_of(distance_of(key), following)


@inlined
def _may_return(f: int, row: int) -> bool:
    """Return whether a row is neither deleted nor excluded by the filter."""
    alive, allowed = get_i64(f, fields.ALIVE), get_i64(f, fields.ALLOWED)
    if alive != 0 and not has_bit(alive, row):
        return False
    return allowed == 0 or has_bit(allowed, row)
