"""Who holds which KV block: references, prefix cache, eviction and reservations.

Pure bookkeeping over block numbers; the bytes are in `arena.py`. A block is free, held (one or more
references) or cached (no reference; it can be found by the hash of everything up to its end, and
the least recently used is evicted when room is needed). A table reserves at its opening every block
that its request may come to need, so a running request never waits for memory and nothing is ever
preempted. The block log is told which hashes can be found.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workers.kv.block_log import BlockLog
from workers.llm.sim.arena import MASK


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


class BlockManager:
    """Every block is in exactly one of: free, cached, held."""

    def __init__(self, block_count: int, block_log: BlockLog) -> None:
        assert block_count > 0
        self.block_count = block_count
        self._log = block_log
        self.evictions_total = 0
        self._free = list(range(block_count - 1, -1, -1))
        self._references = [0] * block_count
        self._hash_of: list[int | None] = [None] * block_count
        self._by_hash: dict[int, int] = {}
        # In order of last use. To find a dictionary's first entry takes the longer, the more were
        # deleted before it: half of an engine's time under prompts of 100 000 tokens.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.block_count - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that a new table could still be promised."""
        return len(self._free) + len(self._cached) - self._reserved

    def matched(self, hashes: Sequence[int], salt: int = 0) -> list[int]:
        """Blocks of the longest known prefix of this hash chain; takes no references."""
        found = []
        for value in hashes:
            block = self._by_hash.get((value + salt) & MASK)
            if block is None:
                break
            found.append(block)
        return found

    def open(
        self, hashes: Sequence[int], blocks_now: int, blocks_max: int, salt: int = 0
    ) -> BlockTable | None:
        """A table that starts with the cached prefix, holds `blocks_now` and may grow to
        `blocks_max`.

        None when there is not enough room; nothing is changed then.
        """
        prefix = self.matched(hashes, salt)[:blocks_now]
        idle = sum(1 for block in prefix if not self._references[block])
        if blocks_max - len(prefix) + idle > self.available:
            return None
        for block in prefix:
            self._hold(block)
        table = BlockTable(prefix, len(prefix), blocks_max - len(prefix), salt=salt)
        self._reserved += table.reserved
        for _ in range(blocks_now - len(prefix)):
            self.grow(table)
        return table

    def grow(self, table: BlockTable) -> int:
        """Append one reserved block; if none is free, evict the least recently used."""
        assert not table.closed
        assert table.reserved > 0
        table.reserved -= 1
        self._reserved -= 1
        if not self._free:
            self._evict()
        block = self._free.pop()
        self._references[block] = 1
        table.blocks.append(block)
        return block

    def remember(self, block: int, value: int, salt: int = 0) -> None:
        """Make a held, full block findable by its hash; the first block of a hash keeps it."""
        assert self._references[block] > 0
        value = (value + salt) & MASK
        if value not in self._by_hash and self._hash_of[block] is None:
            self._by_hash[value] = block
            self._hash_of[block] = value
            self._log.stored((value,))

    def detach(self, table: BlockTable, first: int) -> list[int]:
        """Take the blocks from `first` on out of a table; their references pass to the caller."""
        assert not table.closed
        taken = table.blocks[first:]
        del table.blocks[first:]
        return taken

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
                self._free.append(block)
            else:
                self._cached[block] = None

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            del self._cached[block]
        self._references[block] += 1

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        value = self._hash_of[block]
        assert value is not None
        del self._by_hash[value]
        self._hash_of[block] = None
        self._free.append(block)
        self.evictions_total += 1
        self._log.removed((value,))
