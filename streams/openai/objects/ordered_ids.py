"""Ids of objects in the order of their creation, without a sort per call. Pure."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class OrderedIds:
    """Ids ordered by creation time, and then by id: all of them, and those of each kind."""

    def __init__(self) -> None:
        self._created_ms: dict[str, int] = {}
        self._kinds: dict[str, tuple[str, ...]] = {}
        self._keys: dict[str, list[tuple[int, str]]] = {}  # by kind, "": all

    def __len__(self) -> int:
        return len(self._created_ms)

    def __contains__(self, name: str) -> bool:
        return name in self._created_ms

    def add(self, name: str, created_ms: int, *kinds: str) -> None:
        """Add an id, or move it if its time or its kinds have changed."""
        kinds = "", *kinds
        if self._created_ms.get(name) == created_ms and self._kinds[name] == kinds:
            return
        self.drop(name)
        self._created_ms[name], self._kinds[name] = created_ms, kinds
        for kind in kinds:
            insort(self._keys.setdefault(kind, []), (created_ms, name))

    def drop(self, name: str) -> None:
        """Remove an id, if it is there."""
        if name not in self._created_ms:
            return
        key = self._created_ms.pop(name), name
        for kind in self._kinds.pop(name):
            keys = self._keys[kind]
            del keys[bisect_left(keys, key)]
            if not keys:
                del self._keys[kind]

    def beyond(
        self, name: str | None, *, newer: bool, kind: str = "", until: str | None = None
    ) -> Iterator[str]:
        """Return the ids of a kind that are newer or older than `name`, up to `until`, the nearest
        first.

        Both names may be of any kind. None is the end of the list.
        """
        keys = self._keys.get(kind, [])
        older_end, newer_end = (name, until) if newer else (until, name)
        first = 0 if older_end is None else bisect_right(keys, self._key(older_end))
        end = len(keys) if newer_end is None else bisect_left(keys, self._key(newer_end))
        numbers = range(first, end) if newer else range(end - 1, first - 1, -1)
        return (keys[number][1] for number in numbers)

    def _key(self, name: str) -> tuple[int, str]:
        return self._created_ms[name], name
