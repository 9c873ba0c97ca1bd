"""Tables and lists of a million objects, of which no single call takes all.

A call of the interpreter's own, as to make a list of a million numbers, to let one go, or to add
the one entry for which a dictionary is rebuilt, holds its lock for tens of milliseconds, and with
it the event loop. Loops written in Python do not.
"""

import sys
import time
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any, TypeVar

from workers.search.kernels.arrays import Array

_PART, _PAUSE_S = 2_000, 1e-4  # objects, about 0.3 ms; others get the interpreter in between
_SHARDS, _SHARDED_FROM = 256, 4_096  # dictionaries of a table, and its entries before
_LOOKS, _LOOK_S = 100, 0.01  # whether nobody else has a list any more

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class ShardedDict(MutableMapping[Key, int]):
    """A dictionary that is never rebuilt as one; in no order when it is large."""

    def __init__(self) -> None:
        self._shards: list[dict[Key, int]] = [{}]

    def __getitem__(self, key: Key) -> int:
        return self._shards[hash(key) % len(self._shards)][key]

    def __setitem__(self, key: Key, value: int) -> None:
        self._shards[hash(key) % len(self._shards)][key] = value
        if len(self._shards) == 1 and len(self._shards[0]) > _SHARDED_FROM:
            shards: list[dict[Key, int]] = [{} for _ in range(_SHARDS)]
            for moved_key, moved_value in self._shards[0].items():
                shards[hash(moved_key) % _SHARDS][moved_key] = moved_value
            self._shards = shards  # who reads meanwhile finds all in the old one

    def __delitem__(self, key: Key) -> None:
        del self._shards[hash(key) % len(self._shards)][key]

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[Key]:
        for shard in self._shards:
            yield from list(shard)

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, key: Any, default: Any = None) -> Any:
        shards = self._shards
        return shards[hash(key) % len(shards)].get(key, default)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Its value, or what is to stand for it; never raises."""
        shards = self._shards
        return shards[hash(key) % len(shards)].pop(key, default)

    def items(self) -> Any:
        """Pairs, some of them as they were a little earlier if somebody else changes the table."""
        for shard in self._shards:
            yield from list(shard.items())

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()
            time.sleep(_PAUSE_S)


def in_parts(count: int) -> Iterator[tuple[int, int]]:
    """Where parts of so many objects begin and end, with a pause after each."""
    for first in range(0, count, _PART):
        yield first, min(count, first + _PART)
        time.sleep(_PAUSE_S)


def take(items: list[Item], rows: Array) -> list[Item]:
    """Those in these places, int64."""
    out: list[Item] = []
    for first, last in in_parts(len(rows)):
        out += [items[row] for row in rows[first:last].tolist()]
    return out


def release_gradually(holder: list[list[Any] | ShardedDict[Any]]) -> None:
    """Empty what is in `holder`, and it, once nobody else has it; after a second, leave it.

    Callers keep no other names of these lists and tables.
    """
    while holder:
        items = holder.pop()
        for _ in range(_LOOKS):
            if sys.getrefcount(items) <= 2:  # `items`, and the call's own
                break
            time.sleep(_LOOK_S)
        else:
            continue
        if isinstance(items, ShardedDict):
            items.clear()
            continue
        while items:
            del items[-_PART:]
            time.sleep(_PAUSE_S)
