"""Checks an index file before any part of it is used.

A file may come from anywhere, and kernels use its numbers unchecked: they turn rows, edges and
places into addresses. So every type, shape and range is checked here first. Checksums only show
that a file is unchanged. All functions raise ValueError with the expected and the found value.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from workers.vector.index.query import ExternalId
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.distances import padded_dim
from workers.vector.kernels.keys import NOWHERE
from workers.vector.limits import DEGREE_MAX, DIM_MAX, ROWS_MAX, SQUARES_MAX

PAGE = 4_096
_BLOCK_ROWS = 4_096
_DTYPES = {  # types of sections, and their numbers of axes
    "graph": ("<u4", 2), "chain": ("<u4", 2), "entries": ("<i8", 1), "dead": ("<i8", 1),
    "ids": ("<i8", 2), "id_bytes": ("|u1", 1), "payload_ends": ("<i8", 1),
    "payload_bytes": ("|u1", 1), "number": ("<f8", 1), "code": ("<i4", 1),
    "number_rows": ("<i8", 1), "number_more": ("<f8", 1), "code_rows": ("<i8", 1),
    "code_more": ("<i4", 1),
}  # fmt: skip
_VECTORS = {"float32": "<f4", "float16": "<f2"}


def header(header: Any) -> None:
    """Check the numbers of a header, and the places of its sections."""
    expect(isinstance(header, dict), "a header that is an object", header)
    for name, low, high in (
        ("dim", 1, DIM_MAX), ("degree", 2, DEGREE_MAX), ("rows", 0, ROWS_MAX),
        ("live", 0, ROWS_MAX),        ("seed", 0, 2**63), ("epoch", 0, 2**63),
    ):  # fmt: skip
        _check_integer(header[name], name, low, high)
    expect(isinstance(header["notes"], dict), "notes that are an object", header["notes"])
    for field, labels in header["labels"].items():
        is_valid = isinstance(labels, list) and all(isinstance(text, str | bool) for text in labels)
        expect(is_valid and len(set(labels)) == len(labels), f"labels of {field}", labels)
    if header.get("audit") is not None:
        for name in ("rows", "entries", "rounds"):
            _check_integer(header["audit"][name], f"audit.{name}", 0, ROWS_MAX)
        share = header["audit"]["missed_share"]
        expect(isinstance(share, float | int) and 0 <= share <= 1, "a missed share", share)
        for point in header["audit"].get("efforts", ()):
            fits = all(isinstance(value, float | int) for value in point) and len(point) == 3
            fits = fits and point[0] >= 1 and 0 <= min(point[1:]) and max(point[1:]) <= 1
            expect(fits, "the length of a routing list and two shares", point)
    for fields in header["sections"]:
        section(fields, header["storage"])


def section(fields: Mapping[str, Any], storage: str) -> int:
    """Check a section's type, shape and place; return its size in bytes."""
    name, shape = fields["name"], fields["shape"]
    dtype, axes = (
        (_VECTORS[storage], 2) if name == "vectors" else _DTYPES[name.partition(":")[0]]
    )  # fmt: skip
    expect(fields["dtype"] == dtype, f"{dtype} in section {name}", fields["dtype"])
    expect(isinstance(shape, list) and len(shape) == axes, f"{axes} axes of {name}", shape)
    for size in shape:
        _check_integer(size, f"the shape of {name}", 0, 2**48)
    _check_integer(fields["offset"], f"the offset of {name}", 0, 2**62)
    expect(fields["offset"] % PAGE == 0, f"whole pages before {name}", fields["offset"])
    size_bytes: int = math.prod(shape) * np.dtype(dtype).itemsize
    return size_bytes


def arrays(header: Mapping[str, Any], sections: Mapping[str, Array]) -> None:
    """Check that sections fit each other, and that their numbers are within bounds."""
    rows, dim, graph = header["rows"], header["dim"], sections["graph"]
    linked = len(graph)
    _check_shape(sections, "vectors", (rows, padded_dim(dim)))
    _check_shape(sections, "ids", (2, rows))
    expect(linked <= rows and graph.shape[1] == header["degree"], "a graph of rows", graph.shape)
    _check_rows(graph, "graph", linked)
    _check_rows(sections["entries"], "entries", linked)
    if "chain" in sections:
        _check_shape(sections, "chain", (linked, 1))
        rest = np.flatnonzero(sections["chain"][:, 0] != NOWHERE)
        following = sections["chain"][rest, 0]
        ascends = bool((following > rest).all() and (following < linked).all())
        expect(ascends, "a chain that ascends to its end", following)
    expect(len(sections["entries"]) > 0 or not linked, "entry points", 0)
    _check_rows(sections["dead"], "dead", rows)
    dead = np.unique(sections["dead"])
    expect(len(dead) == len(sections["dead"]) == rows - header["live"], "each dead row once", dead)
    _check_ids(sections["ids"][0], sections["ids"][1], len(sections["id_bytes"]))
    if "payload_ends" in sections:
        _check_shape(sections, "payload_ends", (rows,))
        _check_ends(sections["payload_ends"], len(sections["payload_bytes"]), "payloads")
    for name, column in sections.items():
        kind, _, field = name.partition(":")
        if kind in ("number", "code"):
            expect(len(column) <= rows, f"at most {rows} values in {name}", len(column))
        low = {"code": -1, "code_more": 0}.get(kind)
        if low is not None and len(column):
            count = len(header["labels"][field])
            expect(column.min() >= low and column.max() < count, f"labels in {name}", column.max())
        if kind in ("number_more", "code_more"):
            base = kind.removesuffix("_more")
            owners = sections[f"{base}_rows:{field}"]
            expect(len(owners) == len(column), f"a row for each value in {name}", len(owners))
            expect(bool((np.diff(owners) >= 0).all()), f"{name} in order of rows", owners)
            _check_rows(owners, name, len(sections[f"{base}:{field}"]))
    for first in range(0, rows, _BLOCK_ROWS):
        block = sections["vectors"][first : first + _BLOCK_ROWS].astype(np.float64)
        squares = np.einsum("ij,ij->i", block, block)
        expect(bool((squares <= SQUARES_MAX).all()), "finite vectors", f"rows from {first} on")


def ids(row_ids: list[ExternalId], dead: list[int]) -> None:
    """Check that no two live rows have the same id."""
    dead_rows = set(dead)
    live = {row_id for row, row_id in enumerate(row_ids) if row not in dead_rows}
    expect(len(live) == len(row_ids) - len(dead_rows), "a live id once", len(live))


def expect(holds: bool, expected: str, actual: Any) -> None:
    """Raise ValueError unless the condition holds."""
    if not holds:
        raise ValueError(f"expected {expected}, found {actual!r:.80}")


def _check_ids(kinds: Array, ends: Array, size: int) -> None:
    lengths = np.diff(ends, prepend=0)
    expect(bool(np.isin(kinds, (0, 1, 2)).all()), "ids of kind 0, 1 or 2", kinds)
    _check_ends(ends, size, "ids")
    expect(bool((lengths[kinds == 0] == 8).all()), "8 bytes of each number", lengths)


def _check_ends(ends: Array, size: int, name: str) -> None:
    lengths = np.diff(ends, prepend=0)
    expect(bool((lengths >= 0).all()), f"{name} one after the other", ends)
    expect((int(ends[-1]) if len(ends) else 0) == size, f"{name} that use all their bytes", size)


def _check_shape(sections: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> None:
    expect(sections[name].shape == shape, f"{name} of shape {shape}", sections[name].shape)


def _check_rows(rows: Array, name: str, limit: int) -> None:
    if rows.size:
        inside = rows.min() >= 0 and rows.max() < limit
        expect(bool(inside), f"rows below {limit} in {name}", (rows.min(), rows.max()))


def _check_integer(value: Any, name: str, low: int, high: int) -> None:
    right = type(value) is int and low <= value <= high
    expect(right, f"{name} from {low} to {high}", value)
