"""The allocation of KV blocks: references, prefix cache, eviction and reservations.

Pure bookkeeping over block numbers; the bytes are in `arena.py`. A block is free, held (one or more
references) or cached (no reference; it can be found by the hash of all tokens up to its end, and
the least recently used is evicted when room is needed). A new table reserves every block that its
request may need, so a running request never waits for memory and is never preempted. A table gets
neighbouring blocks if possible, because these move with one descriptor. The block log records which
hashes can be found.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from workers.kv.block_log import BlockLog
from workers.llm.sim.arena import MASK

# Evicted blocks are chosen among this many cached ones for each needed block; beyond the number
# needed, at most among this share of all cached ones, so that recently used blocks stay.
_SCAN_FACTOR, _SCAN_SHARE = 4, 0.125


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in token order, and how many more it may take.

    Tables are compared by identity. Blocks are found by their hash plus the low 64 bits of `salt`,
    which tell scopes apart, and by the rest of it, which tells adapters apart.
    """

    blocks: list[int] = field(default_factory=list)
    matched: int = 0  # leading blocks that came from the cache
    reserved: int = 0
    closed: bool = False
    salt: int = 0


class FreeBlocks:
    """Free blocks as runs of neighbours; `take` returns blocks of as few runs as possible.

    A run is indexed by both ends, so that a block that becomes free joins its neighbours at once,
    and by its length, to find the shortest one that is long enough.
    """

    def __init__(self, block_count: int) -> None:
        self._count = 0
        self._end_of: dict[int, int] = {}  # by first block; the end is the block behind the last
        self._start_of: dict[int, int] = {}  # by end
        self._starts: dict[int, dict[int, None]] = {}  # by length, oldest first
        self._lengths: list[int] = []  # the existing lengths, sorted
        self._insert(0, block_count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, end in self._end_of.items():
            yield from range(start, end)

    def add(self, block: int) -> None:
        """Add a block that has become free."""
        start, end = block, block + 1
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if end in self._end_of:
            end = self._remove(end)
        self._insert(start, end)

    def take(self, count: int, behind: int) -> Iterator[int]:
        """Yield `count` blocks, if possible those right after the block `behind` (-1: any)."""
        start = behind + 1 if behind >= 0 and behind + 1 in self._end_of else -1
        while count:
            if start < 0:
                start = self._find_fit(count)
            end = self._remove(start)
            last = min(end, start + count)
            if last < end:
                self._insert(last, end)
            yield from range(start, last)
            count -= last - start
            start = -1

    def _find_fit(self, count: int) -> int:
        """Return the start of the shortest run of at least `count` blocks, or of the longest."""
        at = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        return next(iter(self._starts[self._lengths[at]]))

    def _insert(self, start: int, end: int) -> None:
        length = end - start
        self._count += length
        self._end_of[start], self._start_of[end] = end, start
        if length not in self._starts:
            insort(self._lengths, length)
        self._starts.setdefault(length, {})[start] = None

    def _remove(self, start: int) -> int:
        """Remove the run that begins at `start`; return its end."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        length = end - start
        self._count -= length
        del self._starts[length][start]
        if not self._starts[length]:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return end


def neighbours(blocks: Iterable[int], count: int) -> list[int]:
    """Return `count` of these blocks, in as few runs as possible, and the last ones of a run.

    These have the ends of prompts; the prompts' beginnings can be found without them.
    """
    in_order = sorted(blocks)
    starts = [at for at, block in enumerate(in_order) if not at or block - in_order[at - 1] != 1]
    ends = [*starts[1:], len(in_order)]
    stretches = sorted(zip(starts, ends, strict=True), key=lambda bounds: bounds[1] - bounds[0])
    for start, end in stretches:
        if end - start >= count:
            return in_order[end - count : end]
    selection: list[int] = []
    while len(selection) < count:
        start, end = stretches.pop()
        selection += in_order[max(start, end - count + len(selection)) : end]
    return selection


class BlockManager:
    """Allocates blocks; each one is either free, cached or held."""

    def __init__(self, block_count: int, block_log: BlockLog) -> None:
        assert block_count > 0
        self.block_count = block_count
        self._log = block_log
        self.evictions_total = 0
        self._free = FreeBlocks(block_count)
        self._references = [0] * block_count
        self._hash_of: list[int | None] = [None] * block_count
        self._by_hash: dict[int, int] = {}
        # In order of last use. Finding a dict's first entry takes longer the more entries were
        # deleted before it: half of an engine's time with prompts of 100 000 tokens.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0

    @property
    def used(self) -> int:
        """Return the number of blocks with references."""
        return self.block_count - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Return the number of blocks that a new table could reserve."""
        return len(self._free) + len(self._cached) - self._reserved

    def find_prefix(self, hashes: Sequence[int], salt: int = 0) -> list[int]:
        """Return the blocks of the longest cached prefix of this hash chain; add no references."""
        blocks = []
        kind = salt & ~MASK
        for value in hashes:
            block = self._by_hash.get((value + salt) & MASK | kind)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def open(
        self, hashes: Sequence[int], blocks_now: int, blocks_max: int, salt: int = 0
    ) -> BlockTable | None:
        """Return a table that begins with the cached prefix, has `blocks_now` blocks and may grow
        to `blocks_max`.

        Return None, and change nothing, if there is not enough room.
        """
        prefix = self.find_prefix(hashes, salt)[:blocks_now]
        idle = sum(1 for block in prefix if not self._references[block])
        if blocks_max - len(prefix) + idle > self.available:
            return None
        for block in prefix:
            self._hold(block)
        table = BlockTable(prefix, len(prefix), blocks_max - len(prefix), salt=salt)
        self._reserved += table.reserved
        self._take(table, blocks_now - len(prefix))
        return table

    def grow(self, table: BlockTable) -> int:
        """Append one reserved block; if none is free, evict the least recently used."""
        assert not table.closed
        self._take(table, 1)
        return table.blocks[-1]

    def _take(self, table: BlockTable, count: int) -> None:
        """Append `count` reserved blocks to a table."""
        assert table.reserved >= count
        table.reserved -= count
        self._reserved -= count
        self._make_room(count)
        for block in self._free.take(count, table.blocks[-1] if table.blocks else -1):
            self._references[block] = 1
            table.blocks.append(block)

    def remember(self, block: int, value: int, salt: int = 0) -> None:
        """Make a held, full block findable by its hash; the first block of a hash keeps it."""
        assert self._references[block] > 0
        value = (value + salt) & MASK | (salt & ~MASK)
        if value not in self._by_hash and self._hash_of[block] is None:
            self._by_hash[value] = block
            self._hash_of[block] = value
            self._log.add((value & MASK,))

    def detach(self, table: BlockTable, first: int) -> list[int]:
        """Remove the blocks from `first` on from a table; the caller then owns their references."""
        assert not table.closed
        blocks = table.blocks[first:]
        del table.blocks[first:]
        return blocks

    def close(self, table: BlockTable) -> None:
        """Release all blocks and reservations of a table."""
        assert not table.closed
        table.closed = True
        self._reserved -= table.reserved
        table.reserved = 0
        self.release(reversed(table.blocks))  # later blocks are evicted first
        table.blocks = []

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block."""
        for block in blocks:
            count = self._references[block] - 1
            assert count >= 0
            self._references[block] = count
            if count:
                continue
            if self._hash_of[block] is None:
                self._free.add(block)
            else:
                self._cached[block] = None

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            del self._cached[block]
        self._references[block] += 1

    def _make_room(self, count: int) -> None:
        """Evict blocks until `count` are free: neighbours among the least recently used ones, so
        that prompts are not scattered over more and more runs.
        """
        if len(self._free) >= count:
            return
        scan_count = min(_SCAN_FACTOR * count, count + int(_SCAN_SHARE * len(self._cached)))
        for block in neighbours([*islice(self._cached, scan_count), *self._free], count):
            if block in self._cached:
                self._evict(block)

    def _evict(self, block: int) -> None:
        del self._cached[block]
        value = self._hash_of[block]
        assert value is not None
        del self._by_hash[value]
        self._hash_of[block] = None
        self._free.add(block)
        self.evictions_total += 1
        self._log.discard((value & MASK,))
