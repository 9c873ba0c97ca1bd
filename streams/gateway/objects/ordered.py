"""Ids in the order in which what they name was made, found without sorting them. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterator


class Ordered:
    """Ids by when something was made, of equal ones by themselves."""

    def __init__(self) -> None:
        self._made_ms: dict[str, int] = {}
        self._keys: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._made_ms

    def add(self, name: str, made_ms: int) -> None:
        """One that is there already moves where its time is another one."""
        if self._made_ms.get(name) == made_ms:
            return
        self.drop(name)
        self._made_ms[name] = made_ms
        insort(self._keys, (made_ms, name))

    def drop(self, name: str) -> None:
        """It need not be there."""
        made_ms = self._made_ms.pop(name, None)
        if made_ms is not None:
            del self._keys[bisect_left(self._keys, (made_ms, name))]

    def beyond(self, name: str | None, *, newer: bool) -> Iterator[str]:
        """Those on one side of a name, the nearest first; None: all, from the other end."""
        place = None if name is None else bisect_left(self._keys, (self._made_ms[name], name))
        if newer:
            numbers = range(0 if place is None else place + 1, len(self._keys))
        else:
            numbers = range((len(self._keys) if place is None else place) - 1, -1, -1)
        return (self._keys[number][1] for number in numbers)
