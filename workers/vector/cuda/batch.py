"""Searches on a CUDA device: slots, their captured turns, and the slots that have ended.

Theory of operation. A turn is one captured graph: it admits the searches that the host wrote to the
ring, makes some extends of the active slots, and reports the ended ones (`walk.cu`). Graphs differ
in the number of slots that they can step and in the number of extends; the smallest that fits is
launched. At most `DEPTH` turns are in flight: while one runs, the host reads the ended slots of the
one before and writes the next. The device writes hits to host memory, so the host reads an array.
For any active slots, a search's result is that of `steps.py`, to the last bit.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import ConfigError
from workers.vector.cuda import layout
from workers.vector.cuda.copies import DeviceCopies
from workers.vector.cuda.device import Device, Event, Launch, pinned_array, upload
from workers.vector.cuda.rings import DEPTH, Assignment, Rings
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.keys import EMPTY
from workers.vector.limits import (
    CUDA_DIM_MAX,
    CUDA_PLACES,
    CUDA_SLOTS,
    CUDA_TOP_M_MAX,
    K_MAX,
    TASKS_MAX,
)
from workers.vector.traversal import fields
from workers.vector.traversal.slots import hash_places

_THREADS_MAX = 1_024  # threads of a block
_SMALL_SIZES = (64, 256)  # slots of turns that are cheaper if few searches run


def sizes_up_to(places: int) -> tuple[int, ...]:
    """Return the sizes of turns, in slots, ascending, for a batch of `places` searches."""
    return (*(size for size in _SMALL_SIZES if size < places), places)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Sizes of a batch on a device."""

    slots: int = CUDA_SLOTS
    sizes: tuple[int, ...] = sizes_up_to(CUDA_PLACES)  # slots that a turn can step, ascending
    steps: tuple[int, ...] = (4, 32, 128)  # extends of a turn, ascending
    top_m_max: int = CUDA_TOP_M_MAX
    k_max: int = K_MAX
    dim_max: int = CUDA_DIM_MAX
    tasks_max: int = TASKS_MAX  # of one slot in an extend
    seed_rows: int = 256  # rows of a list that a seeding slot measures in an extend
    merge_max: int = 512  # distances of a slot that are merged together
    threads: int = 128  # threads of a slot if all places are taken

    def __post_init__(self) -> None:
        if not _is_power_of_two(self.merge_max) or self.merge_max > 32 * self.threads:
            raise ConfigError(
                "cuda.merge_max: expected a power of two up to 32 times cuda.threads, "
                f"found {self.merge_max}"
            )
        for name in ("sizes", "steps"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ConfigError(f"cuda.{name}: expected ascending numbers, found {values}")
        if self.sizes[-1] > self.slots or not 1 <= self.seed_rows <= self.tasks_max:
            raise ConfigError("cuda: expected sizes up to slots, and seed_rows up to tasks_max")
        if self.threads % 32 or self.dim_max % 16:
            raise ConfigError("cuda: expected threads in whole warps and dim_max in 16s")


def _is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


class DeviceBatch:
    """The slots of one device; `top`, `hit_keys` and `counts` have the results of ended slots."""

    def __init__(self, device: Device, settings: BatchSettings) -> None:
        self.settings, self.places = settings, settings.sizes[-1]
        slots = settings.slots
        self.top = pinned_array(device, (slots, settings.top_m_max), np.uint64)
        self.hit_keys = pinned_array(device, (slots, settings.k_max), np.uint64)
        self.counts = pinned_array(device, (slots, 2), np.int64)  # extends, distances
        self.top[:], self.hit_keys[:] = EMPTY, EMPTY
        self.turns = self.extends = self.tasks = 0
        self.device, self.copies = device, DeviceCopies(device)
        self._rings = Rings(device, slots, settings.dim_max, settings.top_m_max)
        self._memory: list[Any] = []  # memory that the graphs point to
        self._machine = self._layout()
        self._graphs = {
            (size, steps): device.graph(self._turn(size, steps))
            for size in settings.sizes
            for steps in settings.steps
        }
        self._serials = [0] * slots
        self._assignments: dict[int, Assignment] = {}  # by slot, of the next turn
        self._launched_turns: deque[tuple[int, Event]] = deque()

    def assign(self, slot: int, row: Array, query: Array, warm: Array) -> None:
        """Give a slot a search; `row` has device addresses. It begins with the next turn."""
        self._serials[slot] += 1
        self._assignments[slot] = Assignment(slot, self._serials[slot], row, query, warm)

    def give_up(self, slot: int) -> None:
        """Ignore the end of a slot's search; turns in flight may still step the slot."""
        self._serials[slot] += 1
        self._assignments.pop(slot, None)

    @property
    def turns_in_flight(self) -> int:
        """Return the number of turns that were launched and not collected."""
        return len(self._launched_turns)

    def launch(self, active: list[int], extends: int) -> None:
        """Launch a turn of at most `places` slots and about `extends` extends."""
        assert self.turns_in_flight < DEPTH, "the ring is full: collect first"
        offered = self.settings.steps
        steps = offered[max(0, bisect_right(offered, extends) - 1)]
        size = self.settings.sizes[bisect_left(self.settings.sizes, len(active))]
        self._rings.write(self.turns, active, self._assignments.values())
        self._assignments = {}
        event = self._graphs[size, steps].launch()
        self._launched_turns.append((self.turns, event))
        self.turns += 1
        self.extends += steps

    def collect(self) -> list[int]:
        """Wait for the oldest turn; return its ended slots that were not given up, ascending."""
        turn, event = self._launched_turns.popleft()
        event.wait()
        endings, tasks = self._rings.read(turn)
        self.tasks += tasks
        return [slot for slot, serial in endings if serial == self._serials[slot]]

    def _layout(self) -> int:
        """Allocate all memory; return the address of the structure that kernels get."""
        sizes, rings, slots = self.settings, self._rings, self.settings.slots
        visited = hash_places(sizes.top_m_max)
        arrays = {  # bytes per slot
            "fields": 8 * fields.COUNT, "top": 8 * sizes.top_m_max, "found": 8 * sizes.k_max,
            "visited": 4 * visited, "queries": 4 * sizes.dim_max, "warm": 8 * sizes.top_m_max,
            "rows": 4 * sizes.tasks_max, "distances": 4 * sizes.tasks_max, "pending": 4,
            "serials": 8, "active": 4,
        }  # fmt: skip
        shared = {"active_count": 4, "ended_count": 4, "turn": 8, "tasks": 8}
        places = {name: self._allocate(size * slots) for name, size in arrays.items()}
        places |= {name: self._allocate(size) for name, size in shared.items()}
        host = {
            "ring_in": rings.into, "ring_out": rings.out, "host_top": self.top,
            "host_found": self.hit_keys, "host_counts": self.counts,
        }  # fmt: skip
        places |= {name: array.ctypes.data for name, array in host.items()}
        numbers = {
            "slots": slots, "top_m_max": sizes.top_m_max, "k_max": sizes.k_max,
            "dim_max": sizes.dim_max, "visited_places": visited, "tasks_max": sizes.tasks_max,
            "list_places": self._list_places, "merge_max": sizes.merge_max,
            "seed_rows": sizes.seed_rows, "ring_depth": DEPTH,
            "ring_in_words": rings.into.shape[1], "ring_out_words": rings.out.shape[1],
            "record_words": rings.record_words, "host_top_bytes": self.top.strides[0],
            "host_found_bytes": self.hit_keys.strides[0],
        }  # fmt: skip
        members = places | numbers
        structure = np.array([members[name] for name in layout.MACHINE], np.int64)
        memory = upload(self.device, structure)
        self._memory.append(memory)
        return memory.address

    def _allocate(self, size_bytes: int) -> int:
        memory = self.device.memory(size_bytes)
        self._memory.append(memory)
        return memory.address

    @property
    def _list_places(self) -> int:
        return max(self.settings.top_m_max, self.settings.k_max) + 1

    def _turn(self, size: int, steps: int) -> list[Launch]:
        """Return the launches of a turn; in a turn of fewer slots, each slot has more threads."""
        sizes = self.settings
        threads = min(_THREADS_MAX, sizes.threads * (self.places // size))
        shared_bytes = 8 * (fields.COUNT + 1 + 3 * self._list_places + sizes.merge_max + 1)
        walk = Launch(
            kernel="walk", grid=size, threads=threads, structure=self._machine,
            number=steps, shared_bytes=shared_bytes,
        )  # fmt: skip
        begin = Launch(
            kernel="turn_begin", grid=size, threads=sizes.threads, structure=self._machine
        )
        end = Launch(kernel="turn_end", grid=1, threads=32, structure=self._machine)
        return [begin, walk, end]
