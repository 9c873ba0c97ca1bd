"""Processes tables and lists of a million objects in parts.

One call into the interpreter's C code can hold its lock, and block the event loop, for tens of
milliseconds: to make or free a list of a million numbers, or to add the entry that resizes a large
dictionary. Loops written in Python do not.
"""

import sys
import time
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any, TypeVar

from workers.vector.kernels.arrays import Array

_PART, _PAUSE_S = 2_000, 1e-4  # objects, about 0.3 ms; other threads run during a pause
_SHARDS, _SHARDED_FROM = 256, 4_096  # dictionaries of a table, and the entries up to which one is
_LOOKS, _LOOK_S = 100, 0.01  # checks whether a list is still referenced elsewhere

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class ShardedDict(MutableMapping[Key, int]):
    """A dictionary in shards, so that no resize is large; a large one has no order."""

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
            self._shards = shards  # concurrent readers find all entries in the old dictionary

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
        """Remove a key and return its value, or the default; never raises."""
        shards = self._shards
        return shards[hash(key) % len(shards)].pop(key, default)

    def items(self) -> Any:
        """Yield pairs; some may be outdated if another thread changes the table."""
        for shard in self._shards:
            yield from list(shard.items())

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()
            time.sleep(_PAUSE_S)


def in_parts(count: int) -> Iterator[tuple[int, int]]:
    """Yield starts and ends of parts of `count` objects, with a pause after each."""
    for first in range(0, count, _PART):
        yield first, min(count, first + _PART)
        time.sleep(_PAUSE_S)


def take(items: list[Item], rows: Array) -> list[Item]:
    """Return the items at these places, int64."""
    out: list[Item] = []
    for first, last in in_parts(len(rows)):
        out += [items[row] for row in rows[first:last].tolist()]
    return out


def release_gradually(holder: list[list[Any] | ShardedDict[Any]]) -> None:
    """Free the containers in `holder` in parts, each when nothing else references it.

    A container that is still referenced after a second is left to the garbage collector. Callers
    keep no other references to them.
    """
    while holder:
        items = holder.pop()
        for _ in range(_LOOKS):
            if sys.getrefcount(items) <= 2:  # `items`, and the argument of the call
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
