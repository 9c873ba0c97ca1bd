"""A device that takes no time: every search ends in the turn in which it begins, with made-up hits.

What is measured with it is what the host needs of itself.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.workers.vector.cuda.emulator import Array
from workers.vector.cuda import layout
from workers.vector.cuda.device import Launch
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import get_i64, put_i64
from workers.vector.traversal import fields

_AT = {name: place for place, name in enumerate(layout.MACHINE)}
_RING_IN, _RING_OUT, _TURN, _SERIALS = (
    _AT[name] for name in ("ring_in", "ring_out", "turn", "serials")
)  # fmt: skip
_DEPTH, _IN_WORDS, _OUT_WORDS, _SLOTS, _RECORD = (
    _AT[name] for name in ("ring_depth", "ring_in_words", "ring_out_words", "slots", "record_words")
)
_TOP, _TOP_BYTES, _FOUND, _FOUND_BYTES, _COUNTS = (
    _AT[n] for n in ("host_top", "host_top_bytes", "host_found", "host_found_bytes", "host_counts")
)


@kernel
def _turn(m: int) -> None:
    """What a turn does to the structure at an address, without a search."""
    turn, slots = get_i64(get_i64(m, _TURN), 0), get_i64(m, _SLOTS)
    ring = turn % get_i64(m, _DEPTH)
    into = get_i64(m, _RING_IN) + 8 * ring * get_i64(m, _IN_WORDS)
    out = get_i64(m, _RING_OUT) + 8 * ring * get_i64(m, _OUT_WORDS)
    admitted = get_i64(into, 1)
    for i in range(admitted):
        record = into + 8 * (2 + slots + i * get_i64(m, _RECORD))
        slot, serial, f = get_i64(record, 0), get_i64(record, 1), record + 16
        top = get_i64(m, _TOP) + slot * get_i64(m, _TOP_BYTES)
        hits = get_i64(m, _FOUND) + slot * get_i64(m, _FOUND_BYTES)
        for n in range(get_i64(f, fields.TOP_M)):
            put_i64(top, n, ((0x80000000 | n) << 32) | (n << 1))
        for n in range(get_i64(f, fields.K)):
            put_i64(hits, n, ((0x80000000 | n) << 32) | (n << 1))
        feed, counts = get_i64(f, fields.FEED), get_i64(m, _COUNTS) + 16 * slot
        put_i64(counts, 0, 1)
        put_i64(counts, 1, 1)
        if feed != 0:
            k, rows = get_i64(f, fields.K), get_i64(feed, fields.FEED_ROWS)
            for n in range(
                k * get_i64(feed, fields.FEED_NEXT), k * get_i64(feed, fields.FEED_LAST)
            ):
                put_i64(rows, n, n % k)
            put_i64(feed, fields.FEED_NEXT, get_i64(feed, fields.FEED_LAST))
        put_i64(out, 2 + i, slot | (serial << 32))
    put_i64(out, 0, admitted)
    put_i64(out, 1, admitted)
    put_i64(get_i64(m, _TURN), 0, turn + 1)


@dataclass(frozen=True, slots=True, eq=False)
class NullMemory:
    """Host memory."""

    room: Array

    @property
    def address(self) -> int:
        return int(self.room.ctypes.data)


class NullDevice:
    """A `Device`, an `Event` and whatever else is asked of one."""

    multiprocessors = 128

    def memory(self, size_bytes: int) -> NullMemory:
        return NullMemory(np.zeros(size_bytes, np.uint8))

    def pinned(self, size_bytes: int) -> Array:
        return np.zeros(size_bytes, np.uint8)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(target, source, size_bytes)

    def run_now(self, launch: Launch) -> None:
        """Graphs that are made up are not looked at."""

    def graph(self, launches: Sequence[Launch]) -> "NullGraph":
        return NullGraph(launches[0].structure)


@dataclass(frozen=True, slots=True)
class NullGraph:
    """A turn."""

    machine: int

    def launch(self) -> "NullGraph":
        _turn(self.machine)
        return self

    def wait(self) -> None:
        """It is over already."""
