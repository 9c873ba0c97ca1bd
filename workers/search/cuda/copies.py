"""What searches point to, on the device: vectors, graphs, entry points, bit sets and lists of rows.

An array is copied when a search first needs it, and its copy goes with it. Vectors grow in place,
row after row (`rows.py`), so of an array that is known only the rows that are new are copied. Of a
version of a graph only the rows that differ from an earlier one are (`deltas.py`).
"""

import weakref
from dataclasses import dataclass

from workers.search.cuda.deltas import DeviceVersions
from workers.search.cuda.device import Device, DeviceMemory
from workers.search.index.plans import PreparedSearch, SearchPlan
from workers.search.index.view import IndexView
from workers.search.kernels.arrays import Array
from workers.search.walk import fields

_WAYS_MAX = 64  # whose rows are kept


@dataclass(slots=True)
class _DeviceCopy:
    memory: DeviceMemory
    rows: int  # that are there


class DeviceCopies:
    """Device copies of host arrays, by identity; for one thread."""

    def __init__(self, device: Device) -> None:
        self._device, self._copies = device, dict[int, _DeviceCopy]()
        self._versions = DeviceVersions(device)
        self._rows: dict[int, tuple[SearchPlan, Array]] = {}  # by the way's place

    def __len__(self) -> int:
        return len(self._copies) + len(self._versions)

    def shared_row(self, search: PreparedSearch) -> Array:
        """What the rows of all searches that go one way have in common, with device addresses.

        A way belongs to one view, which lives as long as a search of it, and with it the copies.
        """
        plan = search.plan
        if plan.where is not None:
            return self.row(plan.row, search)
        cached_pair = self._rows.get(plan.row_address)
        if cached_pair is None or cached_pair[0] is not plan:
            while len(self._rows) >= _WAYS_MAX:
                self._rows.pop(next(iter(self._rows)))
            self._rows[plan.row_address] = cached_pair = (plan, self.row(plan.row, search))
        return cached_pair[1]

    def row(self, row: Array, search: PreparedSearch) -> Array:
        """A slot's row of a search, with device addresses in place of those of host arrays."""
        row, view, where = row.copy(), search.view, search.plan.where
        row[fields.VECTORS] = self.address(view.vectors, view.count)
        if view.linked:
            row[fields.GRAPH] = self.version(view.graph, view)
        if row[fields.REPS_COUNT]:
            nodes = view.nodes if row[fields.WHOLE] else None
            row[fields.REPS] = self.address(view.seeds if nodes is None else nodes)
        if row[fields.CHAIN] and view.chain is not None:
            row[fields.CHAIN] = self.version(view.chain, view)
        if view.alive is not None:
            row[fields.ALIVE] = self.address(view.alive)
        if where is not None:
            row[fields.ALLOWED] = self.address(where.bits)
            if row[fields.LIST_COUNT]:
                row[fields.LIST] = self.address(where.rows)
        return row

    def version(self, array: Array, view: IndexView) -> int:
        """Where a view's graph or chain is on the device."""
        version = next((candidate for candidate in view.versions if candidate.array is array), None)
        return self.address(array) if version is None else self._versions.address(version)

    def address(self, array: Array, rows: int = -1) -> int:
        """Where the first `rows` rows of an array are on the device; -1: all."""
        row_count = len(array) if rows < 0 else rows
        key = id(array)
        if (copy := self._copies.get(key)) is None:
            copy = _DeviceCopy(self._device.memory(max(1, array.nbytes)), 0)
            self._copies[key] = copy
            weakref.finalize(array, self._copies.pop, key, None).atexit = False
        if row_count > copy.rows:
            new = array[copy.rows : row_count]
            target = copy.memory.address + copy.rows * array.strides[0]
            self._device.copy(target, new.ctypes.data, new.nbytes)
            copy.rows = row_count
        return copy.memory.address
