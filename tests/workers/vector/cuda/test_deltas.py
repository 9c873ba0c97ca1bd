"""Versions of a graph on a device are those of the host, and of a new one only changes are sent."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.workers.vector.cuda.batch_searches import SIZES, assign, searches, slot_result
from tests.workers.vector.data import clustered_index, gaussian
from tests.workers.vector.traversal.reference import Reference
from workers.vector.cuda import deltas, layout
from workers.vector.cuda.batch import DeviceBatch
from workers.vector.cuda.deltas import DeviceVersions
from workers.vector.cuda.device import Device, DeviceMemory, Graph, Launch
from workers.vector.cuda.rings import DEPTH
from workers.vector.graph.versions import CHANGES_MAX, GraphVersion, GraphVersions
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.traversal import fields

Array = np.ndarray[Any, Any]

DEGREE = 16
ROW_BYTES = 4 + 4 * DEGREE  # with its number
EFFORT = Effort(k=5, top_m=24)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Counted:
    """Memory whose end is noticed."""

    memory: DeviceMemory

    @property
    def address(self) -> int:
        return self.memory.address


class Counting:
    """A device that counts what is allocated, and what is sent from the host."""

    def __init__(self, device: Device) -> None:
        self._device, self.multiprocessors = device, device.multiprocessors
        self.sent_bytes = self.held_bytes = self.held_bytes_max = 0
        self._there: dict[int, int] = {}

    def memory(self, size_bytes: int) -> DeviceMemory:
        memory = Counted(self._device.memory(size_bytes))
        self.held_bytes += size_bytes
        self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)
        self._there[memory.address] = size_bytes
        weakref.finalize(memory, self._freed, memory.address)
        return memory

    def pinned(self, size_bytes: int) -> Array:
        return self._device.pinned(size_bytes)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        if not any(at <= source < at + size for at, size in self._there.items()):
            self.sent_bytes += size_bytes
        self._device.copy(target, source, size_bytes)

    def run_now(self, launch: Launch) -> None:
        self._device.run_now(launch)

    def graph(self, launches: Sequence[Launch]) -> Graph:
        return self._device.graph(launches)

    def _freed(self, address: int) -> None:
        self.held_bytes -= self._there.pop(address)


def bytes_on_device(device: Device, address: int, array: Array) -> bytes:
    """What lies where the copy of an array is."""
    host_array = np.empty_like(array)
    device.copy(host_array.ctypes.data, int(address), host_array.nbytes)
    return host_array.tobytes()


def first_version(rows: int, seed: int = 0) -> GraphVersions:
    random = np.random.default_rng(seed)
    return GraphVersions(GraphVersion(random.integers(0, rows, (rows, DEGREE), np.uint32)))


def publish_next_version(
    versions: GraphVersions, random: np.random.Generator, changed: int, added: int
) -> None:
    rows = len(versions.newest.array)
    array = versions.begin(rows + added)
    changed_rows = random.choice(rows, changed, replace=False)
    array[changed_rows] = random.integers(0, rows, (changed, DEGREE), np.uint32)
    array[rows:] = random.integers(0, rows, (added, DEGREE), np.uint32)
    versions.publish(versions.seal(changed_rows))


@pytest.mark.parametrize("piece_words", [1 << 18, 100])
@pytest.mark.parametrize("seed", range(3))
def test_device_versions_keep_version_while_read(
    device: Device, monkeypatch: pytest.MonkeyPatch, seed: int, piece_words: int
) -> None:
    """Read for any time, some never; changes of any size, sent in any pieces."""
    monkeypatch.setattr(deltas, "_PIECE_WORDS", piece_words)
    random, versions, on_device = (
        np.random.default_rng(seed),
        first_version(200),
        DeviceVersions(device),
    )
    read: list[tuple[GraphVersion, int]] = []
    for _ in range(60):
        changed, added = (int(random.integers(0, limit)) for limit in (40, 12))
        publish_next_version(versions, random, changed, added)
        if random.random() < 0.6:
            read.append((versions.newest, on_device.address(versions.newest)))
        while read and random.random() < 0.4:
            read.pop(int(random.integers(len(read))))
        for version, address in read:
            assert on_device.address(version) == address
            assert bytes_on_device(device, address, version.array) == version.array.tobytes()
        assert len({address for _, address in read}) == len({version for version, _ in read})
    read = []
    del versions, version
    assert len(on_device) == 0


@pytest.mark.parametrize("is_read", [False, True])
def test_device_versions_send_only_changed_rows(device: Device, is_read: bool) -> None:
    """Changes count from the buffered version: the one before, where the newest is read."""
    delta_bytes = []
    for rows in (1_000, 8_000):
        counting = Counting(device)
        versions, on_device = first_version(rows), DeviceVersions(counting)
        beside, random = counting.held_bytes, np.random.default_rng(1)
        on_device.address(versions.newest)
        assert counting.sent_bytes == versions.newest.array.nbytes
        for number in range(12):
            before, former = counting.sent_bytes, versions.newest if is_read else None
            publish_next_version(versions, random, changed=10, added=3)
            on_device.address(versions.newest)
            changes = versions.newest.changes[-2 if is_read and number else -1 :]
            rows_sent = sum(len(row_numbers) for _, row_numbers in changes)
            expected_bytes = 8 * len(layout.CHANGES) + ROW_BYTES * rows_sent
            assert counting.sent_bytes - before == expected_bytes
        del former
        assert len(on_device) == 2
        bytes_max = 2 * (1 + 1 / 8) * versions.newest.array.nbytes
        assert counting.held_bytes_max - beside <= bytes_max
        delta_bytes.append(counting.sent_bytes - 4 * DEGREE * rows)
    assert delta_bytes[0] == delta_bytes[1]


def test_device_versions_send_skipped_versions_with_next(device: Device) -> None:
    counting = Counting(device)
    random, versions, on_device = (
        np.random.default_rng(2),
        first_version(2_000),
        DeviceVersions(counting),
    )
    on_device.address(versions.newest)
    for skipped, whole in ((CHANGES_MAX, False), (CHANGES_MAX + 2, True)):
        before = counting.sent_bytes
        for _ in range(skipped):
            publish_next_version(versions, random, changed=10, added=0)
        address, newest = on_device.address(versions.newest), versions.newest.array
        assert bytes_on_device(device, address, newest) == newest.tobytes()
        assert (counting.sent_bytes - before >= newest.nbytes) == whole


def test_device_versions_ignore_unpublished_version(device: Device) -> None:
    """A link is audited through an engine, and then fails."""
    random, versions, on_device = (
        np.random.default_rng(3),
        first_version(300),
        DeviceVersions(device),
    )
    for _ in range(6):
        on_device.address(versions.newest)
        versions.begin(310)[:] = 9
        void = versions.seal(np.arange(20))
        on_device.address(void)
        del void
        publish_next_version(versions, random, changed=5, added=2)
        address, newest = on_device.address(versions.newest), versions.newest.array
        assert bytes_on_device(device, address, newest) == newest.tobytes()


def test_index_link_sends_only_changes(device: Device) -> None:
    counting = Counting(device)
    index, batch = clustered_index(3_000), DeviceBatch(counting, SIZES)
    for number in range(4):
        index.upsert([f"new {number}"], gaussian(1, 20, seed=number))
        index.link()
        view = index.view()
        before = counting.sent_bytes
        batch.copies.shared_row(searches(view, EFFORT, 1, scanned_rows_max=0)[0])
        sent_bytes = counting.sent_bytes - before
        changed = sum(len(rows) for _, rows in view.versions[0].changes[-2:])
        beside = view.seeds.nbytes + view.vectors.strides[0]
        if number:
            assert sent_bytes <= beside + 8 * len(layout.CHANGES) + changed * ROW_BYTES
            assert sent_bytes < view.graph.nbytes / 8


@pytest.mark.parametrize("seed", range(4))
def test_device_search_matches_reference_while_index_changes(
    device: Device, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Searches of older views are under way while later ones reach the device."""
    monkeypatch.setattr("workers.vector.filters.parts._LOOKS", 1)  # they hold up a compaction
    random = np.random.default_rng(seed)
    index, batch = index_with_duplicates(), DeviceBatch(device, SIZES)
    in_flight: dict[int, tuple[Any, Array]] = {}
    free, names = list(range(SIZES.slots)), 10_000
    for step in range(90):
        what = random.random()
        if what < 0.35:
            count = int(random.integers(1, 8))
            vectors = gaussian(count, 20, seed=1_000 * seed + step)
            vectors[::3] = index.view().vectors[:3, :20][: len(vectors[::3])]  # copies
            index.upsert(range(names, names + count), vectors)
            names += count
        elif what < 0.45:
            index.delete(random.integers(0, names, 20).tolist())
        elif what < 0.7:
            index.link(batch=int(random.integers(1, 20)))
        elif what < 0.73:
            index.compact()
        if free and random.random() < 0.5:
            search = searches(index.view(), EFFORT, 1, scanned_rows_max=0)[0]
            slot = free.pop()
            assign(batch, slot, search)
            in_flight[slot] = search, batch.copies.row(search.row, search)
        for search, row in in_flight.values():
            assert_copied(device, search.view, row)
        if in_flight and batch.turns_in_flight < DEPTH:
            batch.launch(list(in_flight)[: batch.places], 1)
        if batch.turns_in_flight and random.random() < 0.6:
            finish(batch, in_flight, free)
    while in_flight or batch.turns_in_flight:
        if in_flight and batch.turns_in_flight < DEPTH:
            batch.launch(list(in_flight)[: batch.places], 4)
        finish(batch, in_flight, free)


def index_with_duplicates() -> Index:
    """With copies."""
    index = clustered_index(700)
    index.upsert(range(700, 720), index.view().vectors[:20, :20])
    index.link()
    return index


def assert_copied(device: Device, view: IndexView, row: Array) -> None:
    assert bytes_on_device(device, row[fields.GRAPH], view.graph) == view.graph.tobytes()
    if row[fields.CHAIN]:
        assert view.chain is not None
        assert bytes_on_device(device, row[fields.CHAIN], view.chain) == view.chain.tobytes()


def finish(batch: DeviceBatch, in_flight: dict[int, Any], free: list[int]) -> None:
    for slot in batch.collect():
        search, _ = in_flight.pop(slot)
        expected = Reference(search).run()
        result = slot_result(batch, slot, search)
        assert result[:2] == (expected[0].tobytes(), expected[1].tobytes())
        free.append(slot)
