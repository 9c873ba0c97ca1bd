"""KV memory of a simulated worker: a prefix cache by block hash with LRU eviction.

Blocks that a sequence uses are pinned. Unused ones stay cached until memory is needed; the end of a
prompt is evicted before its beginning, as in vLLM's block manager. Counts blocks and stores no
bytes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one sequence: pinned ones with a hash, and the number of others."""

    hashes: list[int]
    private: int


class BlockCache:
    """A cache of at most `blocks_max` blocks that collects its changes until `take`."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.private = 0
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._changed: dict[int, bool] = {}  # by hash: whether it is cached now

    @property
    def used(self) -> int:
        """Return the blocks that are not free, idle ones included."""
        return len(self._pins) + len(self._idle) + self.private

    @property
    def pinned(self) -> int:
        """Return the blocks that cannot be evicted."""
        return len(self._pins) + self.private

    @property
    def has_changed(self) -> bool:
        """Return whether `take` would return any change."""
        return bool(self._changed)

    def depth(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks are cached."""
        count = 0
        for value in hashes:
            if value not in self._pins and value not in self._idle:
                break
            count += 1
        return count

    def hold(self, hashes: Sequence[int], blocks: int) -> SequenceBlocks | None:
        """Pin the leading blocks that are cached and reserve the rest.

        Return None if memory is full. `blocks` is the sequence's whole need, cached blocks
        included.
        """
        cached = self.depth(hashes)
        cached_hashes = list(hashes[:cached])
        fresh, need = cached - sum(map(self._pins.__contains__, cached_hashes)), blocks - cached
        if self.pinned + fresh + need > self.blocks_max:
            return None
        self._pin(cached_hashes)
        self.private += need
        while self.used > self.blocks_max:
            evicted, _ = self._idle.popitem(last=False)
            self._changed[evicted] = False
        return SequenceBlocks(cached_hashes, need)

    def commit(self, blocks: SequenceBlocks, hashes: Sequence[int]) -> None:
        """Give the blocks that a sequence has filled their hashes; `hashes` begins at its first
        block."""
        fresh = hashes[len(blocks.hashes) :]
        self._pin(fresh)
        blocks.hashes.extend(fresh)
        blocks.private -= len(fresh)
        self.private -= len(fresh)

    def release(self, blocks: SequenceBlocks) -> None:
        """Release a sequence's blocks; those with a hash stay cached."""
        self.private -= blocks.private
        pins, idle = self._pins, self._idle
        for value in reversed(blocks.hashes):
            if pins[value] > 1:
                pins[value] -= 1
            else:
                del pins[value]
                idle[value] = None
        blocks.hashes, blocks.private = [], 0

    def clear(self) -> None:
        """Forget all blocks, for a worker that starts again."""
        self._pins.clear()
        self._idle.clear()
        self._changed.clear()
        self.private = 0

    def held_hashes(self) -> list[int]:
        """Return the hashes of all cached blocks."""
        return [*self._pins, *self._idle]

    def take(self) -> tuple[list[int], list[int]]:
        """Return removed and stored hashes since the last call; only the last change of each
        counts."""
        removed = [value for value, there in self._changed.items() if not there]
        stored = [value for value, there in self._changed.items() if there]
        self._changed.clear()
        return removed, stored

    def _pin(self, hashes: Sequence[int]) -> None:
        pins, idle = self._pins, self._idle
        for value in hashes:
            if value in pins:
                pins[value] += 1
                continue
            pins[value] = 1
            if value in idle:
                del idle[value]
            else:
                self._changed[value] = True
