"""An index as one file: written atomically, checked on load, mapped into memory, no pickle.

Layout: 8 bytes of magic, format version and header length (uint32 each), SHA-256 of the header, the
header in JSON, then sections that begin at pages. The header has each section's type, place and
BLAKE2b sum. All numbers are little-endian. `snapshot_checks.py` checks a file, whoever wrote it,
before any part is used. A loaded index reads vectors and graph from the mapped file; the first
upsert copies the vectors.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest, SnapshotError
from workers.vector.filters.columns import ColumnStore
from workers.vector.filters.extra_values import ExtraValues
from workers.vector.graph.build import GraphOf, own_graph
from workers.vector.graph.links import GraphLinks, LinkHistory
from workers.vector.index import packing, snapshot_checks
from workers.vector.index.index import Index
from workers.vector.index.rows import Rows
from workers.vector.index.view import IndexAudit, IndexView
from workers.vector.kernels import codes
from workers.vector.kernels.arrays import Array, unpack_bits
from workers.vector.kernels.metrics import Metric, Storage

MAGIC = b"TRIVIDX\n"
VERSION, _READ = 4, (1, 2, 3, 4)  # payloads since 2, nodes of several rows 3, lists in metadata 4
_HEAD = struct.Struct("<8sII32s")
_PAGE = snapshot_checks.PAGE
_CRAFTED = (KeyError, TypeError, ValueError, AttributeError, RecursionError, InvalidRequest)


class Unfit(SnapshotError):
    """A snapshot that may be intact, but is not for this reader."""


def save(index: Index, path: Path, notes: Mapping[str, Any] | None = None) -> None:
    """Write the index's present state; `notes` (JSON) are the caller's, see `info`.

    Raises OSError."""
    view = index.view()
    arrays = _arrays(view)
    sections, offset = [], 0
    for name, array in arrays.items():
        sections.append(
            {
                "name": name,
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "offset": offset,
                "sum": _sum(array),
            }
        )
        offset += -(-array.nbytes // _PAGE) * _PAGE
    header = {
        "dim": view.dim,
        "metric": view.metric.value,
        "storage": view.storage.value,
        "degree": index.degree,
        "seed": index.seed,
        "epoch": view.epoch,
        "rows": view.count,
        "live": view.live,
        "audit": view.audit and asdict(view.audit),
        "notes": dict(notes or {}),
        "sections": sections,
    }
    labels = packing.labels_json(view.columns.names.copy())
    whole = b"".join([json.dumps(header)[:-1].encode(), b', "labels": {', labels, b"}}"])
    _write(path, whole, list(arrays.values()))


def info(path: Path) -> dict[str, Any]:
    """Read the header of a snapshot, without its sections; raises SnapshotError and OSError."""
    return _header(path)[0]


def load(
    path: Path, *, verify: bool = True, threads: int = 0, mapped: bool = True,
    graph_of: GraphOf = own_graph,
) -> Index:  # fmt: skip
    """Load the index of a file; raises SnapshotError and OSError.

    `verify` reads the whole file once and checks its sums. If `mapped` is false, the file is read
    into memory, and may be deleted on any file system. `graph_of` makes the graph of a rebuild.
    """
    header, begin = _header(path)
    try:
        arrays = {
            part["name"]: _section(path, begin, part, verify, mapped) for part in header["sections"]
        }
        return _index(header, arrays, threads, graph_of)
    except _CRAFTED as error:
        raise _unreadable(path, f"it does not make sense: {error!r}") from error


def _arrays(view: IndexView) -> dict[str, Array]:
    ids, blob = packing.packed_ids(view.ids, view.count)
    ends, payloads = packing.joined(view.payloads, view.count)
    arrays = {
        "vectors": view.vectors[: view.count],
        "graph": view.graph,
        "entries": view.entries,
        "dead": _dead(view),
        "ids": ids,
        "id_bytes": blob,
    }
    if view.chain is not None:
        arrays["chain"] = view.chain
    if len(payloads):
        arrays["payload_ends"], arrays["payload_bytes"] = ends, payloads
    for name, columns in (("number", view.columns.numbers), ("code", view.columns.label_codes)):
        for field, column in columns.copy().items():
            arrays[f"{name}:{field}"] = column[: view.count]
            if (further := view.columns.extras.get(field)) is not None:
                rows, values = further.arrays
                last = np.searchsorted(rows, view.count)
                arrays[f"{name}_rows:{field}"] = rows[:last]
                arrays[f"{name}_more:{field}"] = values[:last]
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _dead(view: IndexView) -> Array:
    """Return the numbers of deleted rows, ascending."""
    if view.alive is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(~unpack_bits(view.alive, view.count))


def _write(path: Path, header: bytes, arrays: list[Array]) -> None:
    """Write a file under a temporary name, then rename it to `path` in one step."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            digest = hashlib.sha256(header).digest()
            file.write(_HEAD.pack(MAGIC, VERSION, len(header), digest))
            file.write(header)
            for array in arrays:
                file.write(bytes(-file.tell() % _PAGE))
                file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Read and check the header; return it, and the offset of the sections."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or head[:8] != MAGIC:
            raise _unreadable(path, f"it does not begin with {MAGIC!r}")
        _, version, length, digest = _HEAD.unpack(head)
        length = min(length, path.stat().st_size)
        if version not in _READ:
            raise Unfit(f"{path}: expected format version {VERSION}, found {version}")
        text = file.read(length)
    if len(text) < length or hashlib.sha256(text).digest() != digest:
        raise _unreadable(path, "its header is damaged or cut off")
    try:
        header: dict[str, Any] = json.loads(text)
        snapshot_checks.header(header)
    except _CRAFTED as error:
        raise _unreadable(path, f"its header does not make sense: {error!r}") from error
    return header, -(-(_HEAD.size + length) // _PAGE) * _PAGE


def _section(path: Path, begin: int, section: dict[str, Any], verify: bool, mapped: bool) -> Array:
    dtype, shape = np.dtype(section["dtype"]), tuple(section["shape"])
    first, size = begin + section["offset"], math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    actual = path.stat().st_size
    if actual < first + size:
        raise _unreadable(
            path, f"expected {first + size} bytes up to section {section['name']}, found {actual}"
        )
    array: Array
    if mapped:
        array = np.memmap(path, dtype, "r", first, shape).view(np.ndarray)
    else:
        array = np.fromfile(path, dtype, math.prod(shape), offset=first).reshape(shape)
    if verify and _sum(array) != section["sum"]:
        raise _unreadable(path, f"the sum of section {section['name']} is wrong")
    return array


def _index(
    header: dict[str, Any], arrays: dict[str, Array], threads: int, graph_of: GraphOf
) -> Index:
    snapshot_checks.arrays(header, arrays)
    index = Index(
        header["dim"], metric=Metric(header["metric"]), storage=Storage(header["storage"]),
        degree=header["degree"], seed=header["seed"], threads=threads, graph_of=graph_of,
    )  # fmt: skip
    columns = ColumnStore()
    for name, array in arrays.items():
        kind, _, field = name.partition(":")
        if kind == "number":
            columns.numbers[field] = np.array(array)
        elif kind == "code":
            columns.label_codes[field] = np.array(array)
        elif kind in ("number_more", "code_more"):
            rows = arrays[f"{kind.removesuffix('more')}rows:{field}"]
            columns.extras[field] = ExtraValues(np.array(rows), np.array(array))
    for field, labels in header["labels"].items():
        columns.keep_labels(field, labels)
    ids = packing.unpacked_ids(arrays["ids"], arrays["id_bytes"])
    dead = arrays["dead"].tolist()
    snapshot_checks.ids(ids, dead)
    payloads = packing.unpacked_payloads(arrays)
    index.rows = Rows(arrays["vectors"], ids, columns, dead, payloads)
    index.links = LinkHistory(
        GraphLinks.first(arrays["graph"], arrays["entries"], arrays.get("chain"))
    )
    linked = index.rows.vectors[: len(index.graph)]
    index.codes = codes.encode_rows(linked, index.metric.number, threads=threads)
    if audit := header.get("audit"):
        efforts = tuple(tuple(point) for point in audit.get("efforts", ()))
        stats = {attr.name: audit[attr.name] for attr in fields(IndexAudit) if attr.name in audit}
        index.audit = IndexAudit(**{**stats, "efforts": efforts})  # older files have more fields
    index.epoch = header["epoch"]
    return index


def _sum(array: Array) -> str:
    data = array.reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _unreadable(path: Path, why: str) -> SnapshotError:
    return SnapshotError(
        f"{path} is no snapshot that can be read: {why}; take an older one, or rebuild the index"
    )
