"""The prefix index: which worker caches which prefix blocks, folded from the workers' KV events.

Theory of operation. One table maps a block's hash (`schemas/prefix.py`) to a bit mask of worker
slots. When a worker's entries are not valid any more (a lost batch, a new epoch), it gets another
slot, which drops all its entries at once. Reads mask out the bits of old slots; a sweep that goes
round the table in small portions clears them, and after that the slot is free again. Segments list
the hashes in order of arrival, each exactly once: the sweep follows them, and hashes above the
bound are evicted from their front. A block that no worker caches stays in the table until the sweep
reaches it.

A cache has a block only together with all blocks before it, or nearly so. So the masks along a
prompt's chain only lose bits, and the few depths at which they do are found by bisection.

A hint only: a lost or late event costs a recomputation, nothing else. Called by
`streams/core/placement/placer.py`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from schemas.prefix import unpack
from schemas.records import KvEvents
from streams.core.fleet.workers import Flags, Life, Rows, Worker, WorkerPool

SEGMENT = 256  # hashes; a portion of the sweep
SLOTS_MAX = 4_096  # worker incarnations in use or not swept yet; others are not indexed
HOLDERS_MAX = 10_000  # workers; those silent for longest are evicted first
NO_SLOT = -1
_ROUNDS = 2  # the rest of the current round of the sweep, and a whole one
DEPTHS_MAX = 8  # distinct depths found exactly; further ones are lower bounds

# (tokens, mask of the slots that cache at least that many); the deepest first for each block size
Levels = list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class _Holder:
    """The index's state of one worker."""

    life: Life
    seq: int  # of the last batch
    block_size: int
    slot: int = NO_SLOT  # NO_SLOT until its next snapshot
    in_snapshot: bool = False  # more parts of a snapshot follow


class PrefixIndex:
    """Prefix blocks by worker; bounded by `blocks_max`."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.version = 0  # incremented when a worker gets or loses its slot
        self._masks: dict[int, int] = {}
        self._segments: deque[list[int]] = deque([[]])
        self._holders: OrderedDict[str, _Holder] = OrderedDict()  # in order of their last batch
        self._slots: list[_Holder | None] = []
        self._slots_of: WeakKeyDictionary[WorkerPool, tuple[int, Rows, int]] = WeakKeyDictionary()
        self._live = 0  # mask of slots in use
        self._of_size: dict[int, int] = {}  # block size: mask of slots in use
        self._free: list[int] = []
        self._retired: list[int] = []  # free after a whole round of the sweep
        self._leaving: list[int] = []  # free when the current round ends
        self._cursor = 0  # the next segment of the sweep
        self._rounds_due = 0  # until the sweep has removed all stale bits
        self._segment_max = max(1, min(SEGMENT, blocks_max // 8))
        self._overflowed = False  # cached blocks were evicted above the bound

    def __len__(self) -> int:
        return len(self._masks)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without `_slots_of`, which is computed from the rest."""
        return {**self.__dict__, "_slots_of": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__dict__.setdefault("_rounds_due", _ROUNDS)  # older versions had none
        self._slots_of = WeakKeyDictionary()

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Return the block sizes of all indexed workers."""
        return tuple(self._of_size)

    def map_hashes(self, names: Callable[[int], Iterable[int]]) -> "PrefixIndex":
        """Return the same index with each hash replaced by one or more others."""
        masks = {name: mask for value, mask in self._masks.items() for name in names(value)}
        segments = deque(
            [n for value in segment for n in names(value)] for segment in self._segments
        )
        index = PrefixIndex(self.blocks_max)
        index.__setstate__({**self.__getstate__(), "_masks": masks, "_segments": segments})
        return index

    def apply(self, record: KvEvents) -> None:
        """Fold one batch. Repeated batches are ignored; after a lost batch the worker is not
        indexed until its next snapshot."""
        holder = self._holders.get(record.worker_id)
        if holder is None or holder.life[1] < record.epoch:
            self.forget(record.worker_id)
            holder = _Holder((record.worker_id, record.epoch), -1, record.block_size)
            self._holders[record.worker_id] = holder
            if len(self._holders) > HOLDERS_MAX:
                self.forget(next(iter(self._holders)))
        self._holders.move_to_end(record.worker_id)
        if record.epoch < holder.life[1] or record.seq <= holder.seq:
            return
        follows = record.seq == holder.seq + 1
        holder.seq = record.seq
        if record.snapshot and not (follows and holder.in_snapshot):
            self._clear(holder)
            self._give_slot(holder)
        elif not follows:
            self._clear(holder)
        holder.in_snapshot = record.snapshot and record.has_more
        if holder.slot != NO_SLOT:
            self._fold(1 << holder.slot, unpack(record.removed), unpack(record.stored))

    def forget(self, worker_id: str) -> None:
        """Drop a worker from the index."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._clear(holder)

    def slot(self, life: Life) -> int:
        """Return the worker's bit in masks; NO_SLOT while this incarnation is not indexed."""
        holder = self._holders.get(life[0])
        return holder.slot if holder is not None and holder.life == life else NO_SLOT

    def is_complete_for(self, life: Life) -> bool:
        """Return whether the index has all blocks of this worker incarnation."""
        return not self._overflowed and self.slot(life) != NO_SLOT

    def _slots_in(self, pool: WorkerPool) -> tuple[int, Rows, int]:
        """Return the version, the slot of each row of a pool (NO_SLOT if not indexed), and the mask
        of these slots. Cached until a slot is assigned or freed (`make bench-decisions`)."""
        cached_slots = self._slots_of.get(pool)
        if cached_slots is None or cached_slots[0] != self.version:
            slots = [self.slot(worker.life) for worker in pool.workers]
            mask = sum(1 << slot for slot in slots if slot != NO_SLOT)
            cached_slots = self._slots_of[pool] = self.version, np.array(slots, np.int64), mask
        return cached_slots

    def levels_of(self, chain_of: Callable[[int], Sequence[int]]) -> Levels:
        """Return how much of a prompt each slot caches; `chain_of` is its chain by block size."""
        levels: Levels = []
        for block_size in self._of_size:
            levels += self.levels(chain_of(block_size), block_size)
        return levels

    def held_by(self, worker: Worker, levels: Levels) -> int:
        """Return the leading tokens that a worker caches."""
        slot = self.slot(worker.life)
        if slot != NO_SLOT:
            for tokens, mask in levels:
                if mask >> slot & 1:
                    return tokens
        return 0

    def rows_holding(self, pool: WorkerPool, levels: Levels) -> list[tuple[int, Flags]]:
        """Return numbers of leading tokens, each with the rows of a pool that cache at least as
        many, in rising order."""
        _, slots, of_pool = self._slots_in(pool)
        return [
            (tokens, self._flags(mask)[slots])
            for tokens, mask in reversed(levels)
            if mask & of_pool
        ]

    def _flags(self, mask: int) -> Flags:
        """Return a mask as an array, one element per slot, and one for NO_SLOT at its end."""
        octets = np.frombuffer(mask.to_bytes(len(self._slots) // 8 + 1, "little"), np.uint8)
        return np.unpackbits(octets, bitorder="little").view(np.bool_)

    def is_held(self, value: int, block_size: int, but_for: int = NO_SLOT) -> bool:
        """Return whether a worker with this block size caches the block; ignore slot `but_for`."""
        mask = self._masks.get(value, 0) & self._of_size.get(block_size, 0)
        return bool(mask if but_for == NO_SLOT else mask & ~(1 << but_for))

    def levels(self, hashes: Sequence[int], block_size: int) -> Levels:
        """Return how much of a chain each slot caches, for slots that cache any of it.

        Exact for the `DEPTHS_MAX` greatest depths. Costs about log2(len(hashes)) look-ups each.
        """
        count, mask_of = len(hashes), self._masks.get
        if not count:
            return []
        first = mask_of(hashes[0], 0) & self._of_size.get(block_size, 0)
        last = mask_of(hashes[-1], 0) & first
        levels: Levels = [(count * block_size, last)] if last else []
        pending = [(0, count - 1, first, last)] if first != last else []
        while pending:
            low, high, low_mask, high_mask = pending.pop()
            exact = len(levels) < DEPTHS_MAX
            while exact and high - low > 1:
                middle = (low + high) // 2
                through = mask_of(hashes[middle], 0) & low_mask | high_mask
                if through == low_mask:
                    low = middle
                elif through == high_mask:
                    high = middle
                else:  # both halves lose bits: first the right one, at greater depths
                    pending.append((low, middle, low_mask, through))
                    low, low_mask = middle, through
            levels.append(((low + 1) * block_size, low_mask))
        return levels

    def depths(self, hashes: Sequence[int], block_size: int) -> dict[Life, int]:
        """Return a chain's cached leading blocks by worker incarnation; exact as in `levels`."""
        depths: dict[Life, int] = {}
        for tokens, mask in reversed(self.levels(hashes, block_size)):
            while mask:
                holder = self._slots[(mask & -mask).bit_length() - 1]
                mask &= mask - 1
                assert holder is not None, "bits of slots that are free are masked out"
                depths[holder.life] = tokens // block_size
        return depths

    @property
    def is_swept(self) -> bool:
        """Return whether the sweep has removed all stale bits and blocks."""
        return not (self._rounds_due or self._retired or self._leaving)

    def sweep(self, segments: int = 1) -> None:
        """Continue the sweep: clear bits of retired slots, drop blocks that no worker caches."""
        for _ in range(segments):
            if self._cursor >= len(self._segments):
                self._end_round()
            segment = self._segments[self._cursor]
            self._put_back(self._drop_unheld(segment) if self._rounds_due else segment)

    def _drop_unheld(self, segment: list[int]) -> list[int]:
        """Return the hashes of a segment that a worker caches; drop the rest."""
        masks, live = self._masks, self._live
        held_values = [value for value in segment if masks[value] & live]
        if len(held_values) < len(segment):
            for value in segment:
                if not masks[value] & live:
                    del masks[value]
        if self._retired or self._leaving:
            for value in held_values:
                masks[value] &= live
        return held_values

    def _put_back(self, segment: list[int]) -> None:
        """Store a swept segment; join it with the one before it if both are small."""
        at = self._cursor
        if at and len(self._segments[at - 1]) + len(segment) <= self._segment_max:
            self._segments[at - 1].extend(segment)
            del self._segments[at]
        else:
            self._segments[at] = segment
            self._cursor += 1

    def _end_round(self) -> None:
        self._cursor = 0
        self._rounds_due = max(0, self._rounds_due - 1)
        self._free += self._leaving
        self._leaving, self._retired = self._retired, []

    def _fold(self, bit: int, removed: Sequence[int], stored: Sequence[int]) -> None:
        masks, last = self._masks, self._segments[-1]
        if len(removed):
            self._rounds_due = _ROUNDS
        for value in removed:
            mask = masks.get(value)
            if mask is not None and mask & bit:
                masks[value] = mask ^ bit
        for value in stored:
            mask = masks.get(value)
            if mask is None:
                masks[value] = bit
                last.append(value)
                if len(last) >= self._segment_max:
                    last = self._next_segment()
            elif not mask & bit:
                masks[value] = mask | bit

    def _next_segment(self) -> list[int]:
        """Begin a segment; sweep two for each filled one, so that the sweep outruns new hashes."""
        last: list[int] = []
        self._segments.append(last)
        self.sweep(2)
        while len(self._masks) > self.blocks_max - self._segment_max:
            self._overflowed = True
            for value in self._segments.popleft():
                del self._masks[value]
            self._cursor = max(0, self._cursor - 1)
        if not self._segments or self._segments[-1]:
            self._segments.append([])
        return self._segments[-1]

    def _give_slot(self, holder: _Holder) -> None:
        if self._free:
            holder.slot = self._free.pop()
            self._slots[holder.slot] = holder
        elif len(self._slots) < SLOTS_MAX:
            holder.slot = len(self._slots)
            self._slots.append(holder)
        else:
            return  # not indexed until its next snapshot
        bit = 1 << holder.slot
        self._live |= bit
        self._of_size[holder.block_size] = self._of_size.get(holder.block_size, 0) | bit
        self.version += 1

    def _clear(self, holder: _Holder) -> None:
        """Drop all entries of a worker."""
        if holder.slot == NO_SLOT:
            return
        bit = 1 << holder.slot
        self._live ^= bit
        self._of_size[holder.block_size] ^= bit
        if not self._of_size[holder.block_size]:
            del self._of_size[holder.block_size]
        self._slots[holder.slot] = None
        self._retired.append(holder.slot)
        self._rounds_due = _ROUNDS
        holder.slot = NO_SLOT
        self.version += 1
