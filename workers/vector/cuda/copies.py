"""Device copies of searches' arrays: vectors, graphs, entry points, bit sets and lists of rows.

An array is copied when a search first needs it; its copy is freed with the array. Vectors grow in
place, row after row (`index/rows.py`), so only the new rows of a known array are copied. Of a
version of a graph, only the rows that differ from an earlier version are copied (`deltas.py`).
"""

import weakref
from dataclasses import dataclass

from workers.vector.cuda.deltas import DeviceVersions
from workers.vector.cuda.device import Device, DeviceMemory
from workers.vector.index.plans import PreparedSearch, SearchPlan
from workers.vector.index.view import IndexView
from workers.vector.kernels.arrays import Array
from workers.vector.traversal import fields

_WAYS_MAX = 64  # plans whose rows are cached


@dataclass(slots=True)
class _DeviceCopy:
    memory: DeviceMemory
    rows: int  # rows copied so far


class DeviceCopies:
    """Device copies of host arrays, by identity; for one thread."""

    def __init__(self, device: Device) -> None:
        self._device, self._copies = device, dict[int, _DeviceCopy]()
        self._versions = DeviceVersions(device)
        self._rows: dict[int, tuple[SearchPlan, Array]] = {}  # by the plan's `row_address`

    def __len__(self) -> int:
        return len(self._copies) + len(self._versions)

    def shared_row(self, search: PreparedSearch) -> Array:
        """Return the row that all searches of a plan share, with device addresses.

        A plan belongs to one view. A search keeps its view alive, and with it the copies.
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
        """Return a slot's row of a search, with the host addresses replaced by the device's."""
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
        """Return the device address of a view's graph or chain."""
        version = next((candidate for candidate in view.versions if candidate.array is array), None)
        return self.address(array) if version is None else self._versions.address(version)

    def address(self, array: Array, rows: int = -1) -> int:
        """Return the device address of the first `rows` rows of an array; -1: all rows."""
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
