"""Index files that somebody made: whatever stands in them, they are refused or searched."""

import copy
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import SnapshotError
from tests.workers.vector.data import gaussian
from workers.vector.index import snapshot
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.keys import NOWHERE

Array = np.ndarray[Any, Any]
ROWS = 1_100
CONTENT: dict[str, Callable[[Array], Any]] = {
    "graph": lambda graph: np.full_like(graph, 2**31),
    "entries": lambda entries: entries - 5_000,
    "chain": lambda chain: np.zeros_like(chain),
    "chain/beyond": lambda chain: np.where(chain == NOWHERE, chain, 5_000).astype(np.uint32),
    "dead": lambda _: np.array([-9, 2**40]),
    "ids": lambda ids: ids + [[0], [2**40]],
    "id_bytes": lambda ids: np.tile(ids[-8:], len(ids) // 8),
    "vectors": lambda vectors: vectors * np.nan,
    "code:kind": lambda codes: codes + 99,
    "number:year": lambda numbers: np.tile(numbers, 3),
    "code_rows:tags": lambda rows: rows[::-1],
    "code_more:tags": lambda codes: codes - 99,
    "number_rows:sizes": lambda rows: rows + 5_000,
    "number_more:sizes": lambda numbers: numbers[1:],
}
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dim": lambda header: header | {"dim": 2_000},
    "dim of text": lambda header: header | {"dim": "9"},
    "degree": lambda header: header | {"degree": 16},
    "rows": lambda header: header | {"rows": 2**30},
    "live": lambda header: header | {"live": 3},
    "storage": lambda header: header | {"storage": "float16"},
    "metric": lambda header: header | {"metric": "nearness"},
    "seed": lambda header: header | {"seed": -1},
    "audit": lambda header: header | {"audit": {"rows": "many"}},
    "labels": lambda header: header | {"labels": {"kind": [["even"]]}},
    "notes": lambda header: header | {"notes": [1]},
    "no sections": lambda header: header | {"sections": []},
    "no object": lambda header: [header],
}
SECTIONS: dict[str, Any] = {
    "objects": {"dtype": "|O"},
    "another type": {"dtype": "<f8"},
    "more axes": {"shape": [ROWS, 4, 4]},
    "a negative size": {"shape": [-1, 16]},
    "a great size": {"shape": [2**62, 2**62]},
    "beyond the end": {"offset": 2**40 * 4_096},
    "before the beginning": {"offset": -4_096},
    "within a page": {"offset": 8},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lists: dict[str, Any] = {"tags": ["a", "b"], "sizes": [1, 2, 3]}
    metadata = [
        {"year": i, "kind": "even" if i % 2 else "odd", **(lists if i < 9 else {})}
        for i in range(ROWS)
    ]
    vectors = gaussian(ROWS, 9)
    vectors[700:710] = vectors[3]
    index = Index.build(vectors, metadata=metadata, degree=8)
    index.delete([0, 1])
    snapshot.save(index, tmp_path / "index")
    return tmp_path / "index"


def with_header(path: Path, data: bytes, header: Any) -> None:
    """A file with another header, whose sum is right, before the sections' bytes."""
    text = json.dumps(header).encode()
    head = snapshot._HEAD.pack(snapshot.MAGIC, snapshot.VERSION, len(text), sha256(text).digest())
    begin = -(-len(head + text) // 4_096) * 4_096
    path.write_bytes((head + text).ljust(begin, b"\0") + data)


def is_refused(path: Path) -> None:
    with pytest.raises(SnapshotError, match="no snapshot that can be read"):
        index = snapshot.load(path)
        index.search(gaussian(20, 9), Effort(k=5))
        index.compact()


@pytest.mark.parametrize("name", CONTENT)
def test_load_rejects_content_that_points_beyond_arrays(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, shapes and ranges are checked before use: some of these ended the process."""
    index, arrays = snapshot.load(path), snapshot._arrays

    def changed(view: Any) -> dict[str, Array]:
        arrays_by_name, section = arrays(view), name.partition("/")[0]
        return arrays_by_name | {
            section: np.ascontiguousarray(CONTENT[name](arrays_by_name[section]))
        }

    monkeypatch.setattr(snapshot, "_arrays", changed)
    snapshot.save(index, path)
    is_refused(path)


@pytest.mark.parametrize("name", HEADERS)
def test_load_rejects_wrong_headers(path: Path, name: str) -> None:
    """`trivium index info` rejects them too where it shows the number."""
    header, begin = snapshot._header(path)
    with_header(path, path.read_bytes()[begin:], HEADERS[name](header))
    is_refused(path)


@pytest.mark.parametrize("name", SECTIONS)
def test_load_rejects_wrong_sections(path: Path, name: str) -> None:
    """A section of Python objects would be read as such."""
    header, begin = snapshot._header(path)
    data = path.read_bytes()[begin:]
    for number in range(len(header["sections"])):
        crafted = copy.deepcopy(header)
        crafted["sections"][number] |= SECTIONS[name]
        if 0 not in header["sections"][number]["shape"] and crafted != header:
            with_header(path, data, crafted)
            is_refused(path)


def test_random_byte_changes_never_end_process(path: Path) -> None:
    """Any byte may differ: the file is rejected, or searched as ever."""
    random, whole = np.random.default_rng(0), path.read_bytes()
    for _ in range(150):
        data = bytearray(whole)
        for at in random.integers(0, len(data), 3).tolist():
            data[at] = int(random.integers(0, 256))
        path.write_bytes(data)
        try:
            index = snapshot.load(path, verify=False)
            index.search(gaussian(5, 9), Effort(k=5))
        except SnapshotError:
            continue
