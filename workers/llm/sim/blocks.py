"""Who holds which KV block: references, prefix cache, eviction and reservations.

Pure bookkeeping over block numbers; the bytes are in `arena.py`. A block is free, held (one or more
references) or cached (no reference; it can be found by the hash of everything up to its end, and
the least recently used is evicted when room is needed). A table reserves at its opening every block
that its request may come to need, so a running request never waits for memory and nothing is ever
preempted. It gets neighbours where there are some, for neighbours move with one descriptor. The
block log is told which hashes can be found.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from workers.kv.block_log import BlockLog
from workers.llm.sim.arena import MASK

# Of how many cached blocks neighbours are chosen, for each that is needed; at most so large a share
# of all, beyond those needed: what was used lately stays.
_SCAN_FACTOR, _SCAN_SHARE = 4, 0.125


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in token order, and how many more it may take.

    Two tables with the same content are still two tables. `salt` is added to the hashes by which
    its blocks are found: so tables of another scope do not find them.
    """

    blocks: list[int] = field(default_factory=list)
    matched: int = 0  # leading blocks that came from the cache
    reserved: int = 0
    closed: bool = False
    salt: int = 0


class FreeBlocks:
    """Free blocks as stretches of neighbours; what is given out is of as few stretches as can be.

    A stretch is known by both of its ends, so that a block which becomes free joins its neighbours
    at once; and by its length, for the search of the shortest that suffices.
    """

    def __init__(self, block_count: int) -> None:
        self._count = 0
        self._end_of: dict[int, int] = {}  # by first block; the end is the block behind the last
        self._start_of: dict[int, int] = {}  # by end
        self._starts: dict[int, dict[int, None]] = {}  # by length, oldest first
        self._lengths: list[int] = []  # that there are, sorted
        self._insert(0, block_count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, end in self._end_of.items():
            yield from range(start, end)

    def add(self, block: int) -> None:
        """A block has become free."""
        start, end = block, block + 1
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if end in self._end_of:
            end = self._remove(end)
        self._insert(start, end)

    def take(self, count: int, behind: int) -> Iterator[int]:
        """So many blocks, if possible those right behind a block (-1: behind none)."""
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
        """Where the shortest stretch of at least so many begins, else the longest."""
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
        """Take out the stretch that begins there; returns its end."""
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
    """So many of these blocks, in as few stretches as can be; of a stretch the last ones, which
    hold the ends of prompts: their beginnings are found without them.
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
    """Every block is in exactly one of: free, cached, held."""

    def __init__(self, block_count: int, block_log: BlockLog) -> None:
        assert block_count > 0
        self.block_count = block_count
        self._log = block_log
        self.evictions_total = 0
        self._free = FreeBlocks(block_count)
        self._references = [0] * block_count
        self._hash_of: list[int | None] = [None] * block_count
        self._by_hash: dict[int, int] = {}
        # In order of last use. To find a dictionary's first entry takes the longer, the more were
        # deleted before it: half of an engine's time under prompts of 100 000 tokens.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0

    @property
    def used(self) -> int:
        """Return the number of blocks that somebody holds."""
        return self.block_count - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that a new table could still be promised."""
        return len(self._free) + len(self._cached) - self._reserved

    def find_prefix(self, hashes: Sequence[int], salt: int = 0) -> list[int]:
        """Blocks of the longest known prefix of this hash chain; takes no references."""
        blocks = []
        for value in hashes:
            block = self._by_hash.get((value + salt) & MASK)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def open(
        self, hashes: Sequence[int], blocks_now: int, blocks_max: int, salt: int = 0
    ) -> BlockTable | None:
        """A table that starts with the cached prefix, holds `blocks_now` and may grow to
        `blocks_max`.

        None when there is not enough room; nothing is changed then.
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
        """Append so many reserved blocks."""
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
        value = (value + salt) & MASK
        if value not in self._by_hash and self._hash_of[block] is None:
            self._by_hash[value] = block
            self._hash_of[block] = value
            self._log.add((value,))

    def detach(self, table: BlockTable, first: int) -> list[int]:
        """Take the blocks from `first` on out of a table; their references pass to the caller."""
        assert not table.closed
        blocks = table.blocks[first:]
        del table.blocks[first:]
        return blocks

    def close(self, table: BlockTable) -> None:
        """Give everything back that the table holds or was promised."""
        assert not table.closed
        table.closed = True
        self._reserved -= table.reserved
        table.reserved = 0
        self.release(reversed(table.blocks))  # later blocks are evicted first
        table.blocks = []

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each."""
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
        """Evict until so many blocks are free: of those least recently used, whichever are
        neighbours, else prompts would lie in more and more pieces.
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
        self._log.discard((value,))
