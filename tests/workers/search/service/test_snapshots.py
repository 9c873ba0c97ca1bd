"""Snapshots of a shard: what they hold, and what happens to those that cannot be used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.records import CollectionDeclared, Document
from schemas.retrieval import pack_vector
from tests.workers.search.data import gaussian
from workers.search.index import snapshot
from workers.search.index.index import Index
from workers.search.kernels.metrics import Metric
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings, ShardPlace
from workers.search.service.snapshots import Snapshots
from workers.search.words.changes import DocumentChange
from workers.search.words.passage_store import PassageStore

PLACE = ShardPlace(0, 1)


def held(**rows: int) -> Collections:
    """Collections with so many rows."""
    found = Collections(RetrievalSettings())
    found.indexes.update({name: built(count) for name, count in rows.items()})
    return found


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
        self.snapshots(name, held(**rows), lambda: at(offset)).save()
        return self.whole()[-1]

    def read(self, name: str = "b") -> tuple[Any, dict[str, int]]:
        """Where to read on, and rows by collection."""
        found = Collections(self.settings)
        offsets = self.snapshots(name, found).load()
        return offsets, {name: len(index) for name, index in found.indexes.items()}

    def whole(self) -> list[Path]:
        return sorted(self.folder.glob("*.snapshot"))

    def names(self) -> list[str]:
        return sorted(each.suffix for each in self.folder.iterdir())


@pytest.fixture
def replicas(tmp_path: Path) -> Replicas:
    return Replicas(tmp_path)


def test_vectors_are_kept_as_a_setting_says_and_other_files_are_not_used(tmp_path: Path) -> None:
    private = Replicas(tmp_path, shares_snapshots=False, storages=("c=float16",))
    mine = Collections(private.settings)
    document = Document(
        document_id="a", collection="c", vector=pack_vector([1.0, 1.0 / 3]), at_ms=0
    )
    mine.apply(
        [
            DocumentChange("c", "a", document),
            DocumentChange("d", "a", replace(document, collection="d")),
        ]
    )
    assert [mine.get(name).rows.vectors.dtype for name in ("c", "d")] == [np.float16, np.float32]
    private.snapshots("r", mine).save()
    again = Collections(private.settings)
    assert private.snapshots("r", again).load() is not None
    assert again.get("c").rows.vectors.dtype == np.float16
    assert again.get("c").threads == mine.get("c").threads == 1, "builds keep to the lanes, too"
    assert private.read("other") == (None, {}), "of another worker"
    private.settings = replace(private.settings, storages=())
    assert private.read("r") == (None, {})
    assert len(list(tmp_path.glob("r/*.snapshot"))) == 1, "it is not damaged"


async def test_the_first_replica_writes_and_the_others_read(replicas: Replicas) -> None:
    await replicas.snapshots("b", held(c=9), is_first=False).save_if_wanted()
    assert not replicas.folder.exists()
    await replicas.snapshots("a", held(c=10, d=3), lambda: at(7)).save_if_wanted()
    (replicas.folder / "1-0.b.partial").mkdir()
    found = Collections(replicas.settings)
    assert replicas.snapshots("b", found).load() == at(7)
    assert replicas.names() == [".snapshot"], "what its former process left is gone"
    assert {name: len(index) for name, index in found.indexes.items()} == {"c": 10, "d": 3}
    assert found.has("documents", "d", 0, 6) and not found.has("documents", "d", 0, 7)
    base = found.get("c").rows.vectors.base
    assert base is None or not isinstance(base, np.memmap), "of a file that another may remove"


def test_replicas_of_shard_and_prefix_have_a_folder(replicas: Replicas) -> None:
    """Who finds another shard's files there leaves them alone."""
    replicas.write(1, c=10)
    found = Collections(replicas.settings)
    other = Snapshots(
        replicas.settings, found, ShardPlace(1, 2), lambda: at(0),
        worker_id="x", shard_name=replicas.folder.name, is_first=lambda: True,
    )  # fmt: skip
    assert other.load() is None and not found.indexes
    assert replicas.read() == (at(1), {"c": 10})


def test_a_snapshot_that_is_half_written_is_no_snapshot(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new collection's documents were lost where its file was not written yet."""
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


def test_a_reader_whose_snapshot_is_removed_takes_the_next(
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


def test_two_writers_at_once_do_no_harm(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, others = snapshot.save, [13, 12, 11]

    def interrupted(index: Index, path: Path, notes: Any) -> None:
        save(index, path, notes)
        if others:
            replicas.write(others[0], "b", c=others.pop(), d=5)

    monkeypatch.setattr(snapshot, "save", interrupted)
    replicas.write(10, c=10, d=4)
    assert replicas.names() == [".snapshot", ".snapshot"]
    assert not others and replicas.read()[1] in ({"c": 10, "d": 4}, {"c": 13, "d": 5})


def test_what_a_writer_whose_clock_is_behind_writes_is_the_newest(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        replicas.write(number, c=10)
    monkeypatch.setattr("workers.search.service.snapshot_folder.wall_ms", lambda: 1)
    replicas.write(3, c=11)
    assert replicas.read() == (at(3), {"c": 11})


def test_a_damaged_snapshot_is_put_aside_and_the_one_before_it_taken(
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


def test_a_snapshot_of_another_release_is_left_alone(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(snapshot, "VERSION", 99)
        replicas.write(1, c=10)
    assert replicas.read() == (None, {})
    assert replicas.names() == [".snapshot"]


def test_what_changes_while_a_snapshot_is_begun_is_in_it_or_read_again(
    replicas: Replicas,
) -> None:
    """Texts without passages and declarations of that moment were lost."""
    collections = held(c=10)

    def offsets() -> Any:
        collections.stores.setdefault("c", PassageStore()).add_document("late")
        collections.declared.set("c", CollectionDeclared(collection="c", tenants=["t"], at_ms=0))
        collections.indexes["d"] = built(5)
        return at(5)

    replicas.snapshots("a", collections, offsets).save()
    found = Collections(replicas.settings)
    assert replicas.snapshots("b", found).load() == at(5)
    assert found.stores["c"].waiting() == ["late"]
    assert not found.declared.allows("c", "other")
    assert set(found.indexes) == {"c", "d"}
