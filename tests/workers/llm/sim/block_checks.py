"""What tests do to a block manager that no engine does: look at all of it, and drop its cache."""

from workers.kv.block_log import BlockLog
from workers.llm.sim.blocks import BlockManager


def block_manager(block_count: int) -> BlockManager:
    """One whose log nobody reads."""
    return BlockManager(block_count, BlockLog(16, block_count))


def drop_prefix_cache(blocks: BlockManager) -> None:
    """Evict every cached block that nobody holds."""
    while blocks._cached:
        blocks._evict(next(iter(blocks._cached)))


def check_blocks(blocks: BlockManager) -> None:
    """Assert that every block is accounted for once."""
    used_blocks = {block for block, count in enumerate(blocks._references) if count}
    free, cached = set(blocks._free), set(blocks._cached)
    assert len(blocks._free) == len(free)
    assert not (used_blocks & free or used_blocks & cached or free & cached)
    assert len(used_blocks) + len(free) + len(cached) == blocks.block_count
    assert 0 <= blocks._reserved <= len(free) + len(cached)
    assert all(blocks._hash_of[block] == value for value, block in blocks._by_hash.items())
    assert not any(blocks._hash_of[block] is not None for block in free)
