"""The block hashes in an engine's prefix cache, and their changes since the last `take`.

The engine writes the log, and `workers/kv_events.py` publishes it. Routers predict from it how much
of a prompt is cached on a worker. The hashes are those of `schemas/prefix.py`; a block that the
engine has twice is logged once. Not thread-safe: only the event loop calls it.
"""

from collections.abc import Iterable


class BlockLog:
    """A log of at most `blocks_max` hashes; a further one counts the oldest as removed.

    `block_size` is in tokens. Changes are coalesced: a block that was stored and removed between
    two calls of `take` is in neither list, so no list is longer than `blocks_max`.
    """

    def __init__(self, block_size: int, blocks_max: int) -> None:
        self.block_size = block_size
        self._blocks_max = blocks_max
        self._hashes: dict[int, None] = {}  # oldest first
        self._stored: dict[int, None] = {}  # in the cache, not returned by `take` yet
        self._removed: dict[int, None] = {}  # returned as stored, no longer in the cache

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: Iterable[int]) -> None:
        """Record blocks that entered the cache; ignore those that are in it."""
        for block in hashes:
            if block in self._hashes:
                continue
            if len(self._hashes) >= self._blocks_max:
                self._remove(next(iter(self._hashes)))
            self._hashes[block] = None
            if block in self._removed:
                del self._removed[block]
            else:
                self._stored[block] = None

    def discard(self, hashes: Iterable[int]) -> None:
        """Record blocks that were evicted; ignore unknown ones."""
        for block in hashes:
            if block in self._hashes:
                self._remove(block)

    def clear(self) -> None:
        """Record that the whole cache was dropped."""
        for block in list(self._hashes):
            self._remove(block)

    def _remove(self, block: int) -> None:
        del self._hashes[block]
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None

    def take(self) -> tuple[list[int], list[int]]:
        """Return the hashes (removed, stored) since the last call, each in order of time."""
        changes = list(self._removed), list(self._stored)
        self._removed.clear()
        self._stored.clear()
        return changes

    def snapshot(self) -> list[int]:
        """Return every hash in the cache, oldest first."""
        return list(self._hashes)
