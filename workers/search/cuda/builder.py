"""Nearest-neighbour lists of an index that is built, computed on a CUDA device.

The same lists as `knn.py` makes: exact ones by introducing all rows to each other, or NN-descent.
Trees are split and lists turned round on the host, distances and merges are the device's. Edges are
chosen from the lists as ever (`graph/build.py`).
"""

import numpy as np

from workers.search.cuda import layout
from workers.search.cuda.device import Device, DeviceMemory, Launch, upload
from workers.search.graph import build, knn, trees
from workers.search.kernels.arrays import Array, stored_bits
from workers.search.kernels.keys import EMPTY
from workers.search.kernels.metrics import INNER_PRODUCT
from workers.search.limits import CANDIDATES

EXACT_ROWS_MAX = 100_000  # all pairs of so many rows are some seconds' work
THREADS = 128  # of a row


def graph_on(device: Device) -> build.GraphOf:
    """What makes graphs with a device."""

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
    """Keys of the nearest other rows of each row, as `knn.neighbours`: (rows, count), uint64."""
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
    """Lists of `count` keys for each row of `vectors`, on the device."""

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
        """The lists as they are."""
        keys = np.empty((self._rows, self._count), np.uint64)
        self._device.copy(keys.ctypes.data, self._memory["keys"].address, keys.nbytes)
        return keys

    def put(self, keys: Array) -> None:
        """Go on with these lists."""
        self._write("keys", keys)

    def join(self, order: Array, bounds: Array) -> None:
        """Introduce rows to each other, group by group of `order`."""
        self._write("order", order.astype(np.uint32))
        self._write("spans", knn.spans_of(bounds).astype(np.uint32))
        self._launch("join", after="keys", words=2)

    def descend(self) -> int:
        """A round of NN-descent; how many entries are new."""
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
        """One block for each row; `words` of 4 bytes beside what all kernels need."""
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
