"""Snapshots of a shard: what they hold, and what happens to those that cannot be used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.records import CollectionDeclared, Document
from schemas.retrieval import pack_vector
from tests.workers.vector.data import gaussian
from workers.retrieval.collections import Collections
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.passages.passage_store import PassageStore
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.snapshots import Snapshots
from workers.vector.index import snapshot
from workers.vector.index.index import Index
from workers.vector.kernels.metrics import Metric

PLACE = ShardPlace(0, 1)


def collections_with(**rows: int) -> Collections:
    """Collections with so many rows."""
    collections = Collections(RetrievalSettings())
    collections.indexes.update({name: built(count) for name, count in rows.items()})
    return collections


def built(rows: int) -> Index:
    return Index.build(gaussian(rows, 4), metric=Metric.COSINE)


def at(offset: int) -> dict[str, dict[int, int]]:
    return {"documents": {0: offset}, "passages": {0: 0}}


class Replicas:
    """Of one shard, with one folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder / "retrieval-0of1"
        self.settings = RetrievalSettings(
            snapshot_folder=str(folder), **{"shares_snapshots": True, "lanes": 1, **settings}
        )

    def snapshots(
        self,
        name: str,
        collections: Collections,
        offsets: Callable[[], Any] = lambda: at(1),
        *,
        is_first: bool = True,
    ) -> Snapshots:
        return Snapshots(
            self.settings, collections, PLACE, offsets,
            worker_id=name, shard_name=self.folder.name, is_first=lambda: is_first,
        )  # fmt: skip

    def write(self, offset: int, name: str = "a", **rows: int) -> Path:
        """One more snapshot."""
        self.snapshots(name, collections_with(**rows), lambda: at(offset)).save()
        return self.whole()[-1]

    def read(self, name: str = "b") -> tuple[Any, dict[str, int]]:
        """Where to read on, and rows by collection."""
        collections = Collections(self.settings)
        offsets = self.snapshots(name, collections).load()
        return offsets, {name: len(index) for name, index in collections.indexes.items()}

    def whole(self) -> list[Path]:
        return sorted(self.folder.glob("*.snapshot"))

    def names(self) -> list[str]:
        return sorted(path.suffix for path in self.folder.iterdir())


@pytest.fixture
def replicas(tmp_path: Path) -> Replicas:
    return Replicas(tmp_path)


def test_snapshot_keeps_storage_setting_and_ignores_foreign_files(tmp_path: Path) -> None:
    private = Replicas(tmp_path, shares_snapshots=False, storages=("c=float16",))
    collections = Collections(private.settings)
    document = Document(
        document_id="a", collection="c", vector=pack_vector([1.0, 1.0 / 3]), at_ms=0
    )
    collections.apply(
        [
            DocumentChange("c", "a", document),
            DocumentChange("d", "a", replace(document, collection="d")),
        ]
    )
    assert [collections.get(name).rows.vectors.dtype for name in ("c", "d")] == [
        np.float16,
        np.float32,
    ]
    private.snapshots("r", collections).save()
    loaded_collections = Collections(private.settings)
    assert private.snapshots("r", loaded_collections).load() is not None
    assert loaded_collections.get("c").rows.vectors.dtype == np.float16
    assert loaded_collections.get("c").threads == collections.get("c").threads == 1, (
        "builds keep to the lanes, too"
    )
    assert private.read("other") == (None, {}), "of another worker"
    private.settings = replace(private.settings, storages=())
    assert private.read("r") == (None, {})
    assert len(list(tmp_path.glob("r/*.snapshot"))) == 1, "it is not damaged"


async def test_first_replica_writes_snapshot_and_others_read(replicas: Replicas) -> None:
    await replicas.snapshots("b", collections_with(c=9), is_first=False).save_if_wanted()
    assert not replicas.folder.exists()
    await replicas.snapshots("a", collections_with(c=10, d=3), lambda: at(7)).save_if_wanted()
    (replicas.folder / "1-0.b.partial").mkdir()
    loaded_collections = Collections(replicas.settings)
    assert replicas.snapshots("b", loaded_collections).load() == at(7)
    assert replicas.names() == [".snapshot"], "what its former process left is gone"
    assert {name: len(index) for name, index in loaded_collections.indexes.items()} == {
        "c": 10,
        "d": 3,
    }
    assert loaded_collections.has("documents", "d", 0, 6) and not loaded_collections.has(
        "documents", "d", 0, 7
    )
    base = loaded_collections.get("c").rows.vectors.base
    assert base is None or not isinstance(base, np.memmap), "of a file that another may remove"


def test_snapshot_of_other_shard_is_ignored_and_kept(replicas: Replicas) -> None:
    """A replica that finds another shard's files in its folder leaves them alone."""
    replicas.write(1, c=10)
    collections = Collections(replicas.settings)
    other_snapshots = Snapshots(
        replicas.settings, collections, ShardPlace(1, 2), lambda: at(0),
        worker_id="x", shard_name=replicas.folder.name, is_first=lambda: True,
    )  # fmt: skip
    assert other_snapshots.load() is None and not collections.indexes
    assert replicas.read() == (at(1), {"c": 10})


def test_partial_snapshot_is_ignored(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new collection would lose its documents where its file was not written yet."""
    replicas.write(1, c=10)
    save = snapshot.save

    def full(index: Index, path: Path, notes: Any) -> None:
        if notes["collection"] == "d":
            raise OSError("no space left on device")
        save(index, path, notes)
        assert replicas.read() == (at(1), {"c": 10})

    monkeypatch.setattr(snapshot, "save", full)
    with pytest.raises(OSError, match="no space"):
        replicas.write(9, c=11, d=5)
    assert replicas.names() == [".snapshot"]
    assert replicas.read() == (at(1), {"c": 10})


def test_reader_of_removed_snapshot_takes_next(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas.write(1, c=10, d=5)
    load, written = snapshot.load, [11, 12]

    def slow(path: Path, **options: Any) -> Index:
        index = load(path, **options)
        while written:
            replicas.write(written[0], c=written.pop(0), d=6)
        return index

    monkeypatch.setattr(snapshot, "load", slow)
    assert replicas.read() == (at(12), {"c": 12, "d": 6})
    assert replicas.names() == [".snapshot", ".snapshot"], "the one before stays for its readers"


def test_concurrent_writers_leave_whole_snapshots(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, competing_offsets = snapshot.save, [13, 12, 11]

    def interrupted(index: Index, path: Path, notes: Any) -> None:
        save(index, path, notes)
        if competing_offsets:
            replicas.write(competing_offsets[0], "b", c=competing_offsets.pop(), d=5)

    monkeypatch.setattr(snapshot, "save", interrupted)
    replicas.write(10, c=10, d=4)
    assert replicas.names() == [".snapshot", ".snapshot"]
    assert not competing_offsets and replicas.read()[1] in ({"c": 10, "d": 4}, {"c": 13, "d": 5})


def test_snapshot_of_writer_with_slow_clock_is_newest(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        replicas.write(number, c=10)
    monkeypatch.setattr("workers.retrieval.snapshot_folder.wall_ms", lambda: 1)
    replicas.write(3, c=11)
    assert replicas.read() == (at(3), {"c": 11})


def test_damaged_snapshot_is_set_aside_for_previous_one(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(path: Path) -> None:
        for file in path.iterdir():
            file.write_bytes(file.read_bytes()[:-100])

    replicas.write(1, c=10)
    damage(replicas.write(2, c=11))
    assert replicas.read() == (at(1), {"c": 10})
    assert "cannot be read, and is put aside" in caplog.text
    assert replicas.names() == [".snapshot", ".unreadable"]
    lacking = replicas.write(3, c=12, d=5)
    next(lacking.iterdir()).unlink()
    damage(replicas.whole()[0])
    assert replicas.read() == (None, {})
    assert "lacks collections: " in caplog.text
    assert "documents are read from the log" in caplog.text
    assert replicas.names() == [".unreadable"] * 3
    replicas.write(4, c=13)
    assert replicas.names() == [".snapshot", ".unreadable"], "the last one is kept to be looked at"


def test_snapshot_of_other_release_is_kept_unread(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(snapshot, "VERSION", 99)
        replicas.write(1, c=10)
    assert replicas.read() == (None, {})
    assert replicas.names() == [".snapshot"]


def test_snapshot_misses_no_concurrent_changes(
    replicas: Replicas,
) -> None:
    """Texts without passages and declarations of that moment would be lost."""
    collections = collections_with(c=10)

    def offsets() -> Any:
        collections.stores.setdefault("c", PassageStore()).add_document("late")
        collections.declared.set("c", CollectionDeclared(collection="c", tenants=["t"], at_ms=0))
        collections.indexes["d"] = built(5)
        return at(5)

    replicas.snapshots("a", collections, offsets).save()
    loaded_collections = Collections(replicas.settings)
    assert replicas.snapshots("b", loaded_collections).load() == at(5)
    assert loaded_collections.stores["c"].waiting() == ["late"]
    assert not loaded_collections.declared.allows("c", "other")
    assert set(loaded_collections.indexes) == {"c", "d"}
