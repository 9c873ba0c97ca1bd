"""Computes the nearest-neighbour lists of a new index on a CUDA device.

The lists are those of `graph/knn.py`: exact ones, which compare all rows with each other, or those
of NN-descent. The host splits trees and makes reverse lists; the device computes distances and
merges. `graph/build.py` chooses edges from the lists, as for lists of cores.
"""

import numpy as np

from workers.vector.cuda import layout
from workers.vector.cuda.device import Device, DeviceMemory, Launch, upload
from workers.vector.graph import build, knn, trees
from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.keys import EMPTY
from workers.vector.kernels.metrics import INNER_PRODUCT
from workers.vector.limits import CANDIDATES

EXACT_ROWS_MAX = 100_000  # all pairs of that many rows take some seconds
THREADS = 128  # threads of a row


def graph_on(device: Device) -> build.GraphOf:
    """Return a function that builds graphs with a device."""

    def graph_of(
        vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
    ) -> Array:
        count = int(degree * CANDIDATES)
        keys = neighbours(device, vectors, count, metric, stored, seed=seed)
        return build.optimise_graph(keys, degree, threads=threads)

    return graph_of


def neighbours(
    device: Device, vectors: Array, count: int, metric: int, stored: int, *, seed: int = 0,
    exact_rows_max: int = EXACT_ROWS_MAX,
) -> Array:  # fmt: skip
    """Return keys of each row's nearest other rows, like `knn.neighbours`: (rows, count), uint64.

    Raises EngineFailed."""
    lists = Lists(device, vectors, count, metric, stored)
    if len(vectors) <= exact_rows_max:
        lists.join(np.arange(len(vectors)), np.array([0, len(vectors)]))
        return lists.keys()
    random, bits = np.random.default_rng(seed), stored_bits(vectors)
    for _ in range(knn.TREES):
        lists.join(*trees.leaves(bits, stored, random))
    if metric == INNER_PRODUCT:
        keys = lists.keys()
        knn.insert_longest(bits, keys, stored, random)
        lists.put(keys)
    for _ in range(knn.ROUNDS_MAX):
        if lists.descend() < knn.ENOUGH * len(vectors) * count:
            break
    return lists.keys()


class Lists:
    """Neighbour lists of `count` keys for each row of `vectors`, on the device."""

    def __init__(
        self, device: Device, vectors: Array, count: int, metric: int, stored: int
    ) -> None:
        self._device, self._rows, self._count = device, len(vectors), count
        empty = np.full((self._rows, count), EMPTY, np.uint64)
        self._memory: dict[str, DeviceMemory] = {
            "vectors": upload(device, vectors),
            "keys": upload(device, empty),
            "after": device.memory(max(1, empty.nbytes)),
            "reverse": device.memory(max(1, 8 * knn.SAMPLE * self._rows)),
            "order": device.memory(max(1, 4 * self._rows)),
            "spans": device.memory(max(1, 8 * self._rows)),
            "changed": device.memory(8),
        }
        self._numbers = {
            "row_bytes": vectors.strides[0], "length": vectors.shape[1], "metric": metric,
            "stored": stored, "list_size": count,
        }  # fmt: skip

    def keys(self) -> Array:
        """Copy the present lists to the host."""
        keys = np.empty((self._rows, self._count), np.uint64)
        self._device.copy(keys.ctypes.data, self._memory["keys"].address, keys.nbytes)
        return keys

    def put(self, keys: Array) -> None:
        """Replace the lists on the device."""
        self._write("keys", keys)

    def join(self, order: Array, bounds: Array) -> None:
        """Insert the rows of each group of `order` into each other's lists."""
        self._write("order", order.astype(np.uint32))
        self._write("spans", knn.spans_of(bounds).astype(np.uint32))
        self._launch("join", after="keys", words=2)

    def descend(self) -> int:
        """Run a round of NN-descent; return the number of new entries."""
        reverse = np.empty((self._rows, knn.SAMPLE), np.uint64)
        knn.reverse_lists(self.keys(), reverse)
        self._write("reverse", reverse)
        changed = np.zeros(1, np.uint64)
        self._write("changed", changed)
        self._launch("descend", after="after", words=2 + layout.MET + layout.GATHERED)
        self._memory["keys"], self._memory["after"] = self._memory["after"], self._memory["keys"]
        self._device.copy(changed.ctypes.data, self._memory["changed"].address, 8)
        return int(changed[0])

    def _write(self, name: str, array: Array) -> None:
        self._device.copy(self._memory[name].address, array.ctypes.data, array.nbytes)

    def _launch(self, kernel: str, *, after: str, words: int) -> None:
        """Run a kernel with a block per row; `words` of 4 bytes are its extra shared memory."""
        members = self._numbers | {name: memory.address for name, memory in self._memory.items()}
        members["after"] = self._memory[after].address
        structure = upload(
            self._device, np.array([members[name] for name in layout.LISTS], np.int64)
        )
        length = self._numbers["length"]
        shared_bytes = (
            4 * length + 8 * (2 * self._count + layout.TILE) + 4 * layout.TILE + 4 * words
        )
        launch = Launch(
            kernel=kernel, grid=self._rows, threads=THREADS, shared_bytes=shared_bytes,
            structure=structure.address,
        )  # fmt: skip
        self._device.run_now(launch)
