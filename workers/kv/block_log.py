"""What an engine's prefix cache holds, by block hash, and what changed since the last question.

The engine writes the log, `workers/kv_events.py` publishes it, and routers predict from it how much
of a prompt is cached here. A hash is one of `schemas/prefix.py`; a block that the engine has twice
is logged once. Not safe for threads: it belongs to the event loop.
"""

from collections.abc import Iterable


class BlockLog:
    """At most `blocks_max` hashes; beyond that the oldest is taken for removed.

    `block_size` is in tokens. Changes are coalesced: what came and went between two calls of `take`
    is never told, so neither list outgrows `blocks_max`.
    """

    def __init__(self, block_size: int, blocks_max: int) -> None:
        self.block_size = block_size
        self._blocks_max = blocks_max
        self._hashes: dict[int, None] = {}  # the oldest first
        self._stored: dict[int, None] = {}  # held, and not told yet
        self._removed: dict[int, None] = {}  # told, and no longer held

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: Iterable[int]) -> None:
        """These blocks can be found now; those known already change nothing."""
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
        """These blocks were evicted; unknown ones change nothing."""
        for block in hashes:
            if block in self._hashes:
                self._remove(block)

    def clear(self) -> None:
        """The whole cache was dropped."""
        for block in list(self._hashes):
            self._remove(block)

    def _remove(self, block: int) -> None:
        del self._hashes[block]
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None

    def take(self) -> tuple[list[int], list[int]]:
        """The hashes (removed, stored) since the last call, each in order of time."""
        changes = list(self._removed), list(self._stored)
        self._removed.clear()
        self._stored.clear()
        return changes

    def snapshot(self) -> list[int]:
        """Every hash that is held now, the oldest first."""
        return list(self._hashes)
