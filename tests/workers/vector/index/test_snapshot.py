"""A snapshot comes back as it was, or is refused with the reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import SnapshotError
from tests.workers.vector.data import gaussian
from workers.vector.filters.filters import EqualFilter, RangeFilter
from workers.vector.index import snapshot
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.metrics import Metric, Storage

IDS: list[Any] = [1, "uno", b"\x00\xff", -(2**63)]


def varied_index(**settings: Any) -> Index:
    """Linked, loose and deleted rows, ids of all kinds, metadata of all kinds."""
    ids = [*IDS, *range(100, 1_396)]
    metadata = [{"year": i, "language": "it" if i % 3 else "en"} for i in range(1_300)]
    index = Index.build(gaussian(1_300, 9), ids, metadata, degree=8, **settings)
    index.upsert(["uno", 5], gaussian(2, 9, seed=5), [{"year": 3}, {"open": True}])
    index.delete([b"\x00\xff", 200])
    return index


@pytest.mark.parametrize("storage", list(Storage))
def test_snapshot_round_trips_index(tmp_path: Path, storage: Storage) -> None:
    index = varied_index(metric=Metric.COSINE, storage=storage)
    path = tmp_path / "index"
    snapshot.save(index, path, {"offsets": [3, 4]})
    loaded_index = snapshot.load(path)
    assert snapshot.info(path)["notes"] == {"offsets": [3, 4]}
    queries = gaussian(20, 9, seed=2)
    for where in (
        None,
        EqualFilter("language", "it"),
        RangeFilter("year", 2, 9),
        EqualFilter("open", True),
    ):
        effort = Effort(k=5, where=where)
        for before, after in zip(
            index.search(queries, effort), loaded_index.search(queries, effort), strict=True
        ):
            assert before.tobytes() == after.tobytes()
    assert loaded_index.rows.row_of == index.rows.row_of
    assert len(loaded_index) == len(index) == 1_299


def test_loaded_index_accepts_changes(tmp_path: Path) -> None:
    snapshot.save(varied_index(), tmp_path / "index")
    index = snapshot.load(tmp_path / "index")
    vector = 100 * gaussian(1, 9, seed=7)
    index.upsert(["new"], vector, [{"year": 2030}])
    index.delete([100])
    assert index.ids_of(index.search(vector, Effort(k=1))[0][0]) == ["new"]
    assert index.link() == 0
    index.compact()
    assert index.ids_of(index.search(vector, Effort(k=1))[0][0]) == ["new"]
    assert len(index) == index.rows.count == 1_299


def test_load_reads_older_format_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "VERSION", 3)
    snapshot.save(varied_index(), tmp_path / "index")
    assert len(snapshot.load(tmp_path / "index")) == 1_299


def test_snapshot_round_trips_empty_index(tmp_path: Path) -> None:
    snapshot.save(Index(4), tmp_path / "index")
    assert len(snapshot.load(tmp_path / "index")) == 0


def test_load_rejects_damaged_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "index"
    snapshot.save(varied_index(), path)
    whole = path.read_bytes()
    pages = len(whole) // 4_096
    cases = {
        "does not begin with": [b"", whole[:20], b"x" + whole[1:], b"\x93NUMPY" + whole],
        "expected format version 4, found 0": [whole[:8] + bytes(4) + whole[12:]],
        "header is damaged or cut off": [
            whole[:60], whole[:100] + b"!" + whole[101:], whole[:16] + bytes(32) + whole[48:],
        ],
        "expected .* bytes up to section": [whole[: 4_096 * n] for n in (2, pages // 2, pages)],
        "the sum of section vectors is wrong": [whole[:9_000] + b"!!!!" + whole[9_004:]],
    }  # fmt: skip
    for why, files in cases.items():
        for data in files:
            path.write_bytes(data)
            with pytest.raises(SnapshotError, match=why):
                snapshot.load(path)


def test_failed_save_keeps_old_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    snapshot.save(varied_index(), path)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        snapshot.save(Index(4), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_loaded_vectors_are_mapped(tmp_path: Path) -> None:
    snapshot.save(varied_index(), tmp_path / "index")
    index = snapshot.load(tmp_path / "index", verify=False)
    assert not index.rows.vectors.flags.owndata
    assert not index.rows.vectors.flags.writeable
    assert index.rows.vectors.ctypes.data % 64 == 0
    assert np.isfinite(index.rows.vectors).all()
