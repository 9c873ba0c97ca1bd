"""What must hold of an index file before any of it is used.

A file may come from anywhere, and kernels follow its numbers without a look: rows, edges and places
are addresses to them. So every type, shape and range is checked here first. Sums say only that a
file is what somebody wrote. All functions raise ValueError with what was expected and found.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from workers.search.index.query import ExternalId
from workers.search.kernels.arrays import Array
from workers.search.kernels.distances import padded
from workers.search.kernels.keys import NOWHERE
from workers.search.limits import DEGREE_MAX, DIM_MAX, ROWS_MAX, SQUARES_MAX

PAGE = 4_096
_BLOCK_ROWS = 4_096
_DTYPES = {  # of sections, and how many axes they have
    "graph": ("<u4", 2), "chain": ("<u4", 2), "entries": ("<i8", 1), "dead": ("<i8", 1),
    "ids": ("<i8", 2), "id_bytes": ("|u1", 1), "payload_ends": ("<i8", 1),
    "payload_bytes": ("|u1", 1), "number": ("<f8", 1), "code": ("<i4", 1),
    "number_rows": ("<i8", 1), "number_more": ("<f8", 1), "code_rows": ("<i8", 1),
    "code_more": ("<i4", 1),
}  # fmt: skip
_VECTORS = {"float32": "<f4", "float16": "<f2"}


def header(found: Any) -> None:
    """The numbers of a header, and the places of its sections."""
    expect(isinstance(found, dict), "a header that is an object", found)
    for name, least, most in (
        ("dim", 1, DIM_MAX), ("degree", 2, DEGREE_MAX), ("rows", 0, ROWS_MAX),
        ("live", 0, ROWS_MAX),        ("seed", 0, 2**63), ("epoch", 0, 2**63),
    ):  # fmt: skip
        _whole(found[name], name, least, most)
    expect(isinstance(found["notes"], dict), "notes that are an object", found["notes"])
    for field, labels in found["labels"].items():
        alike = isinstance(labels, list) and all(isinstance(each, str | bool) for each in labels)
        expect(alike and len(set(labels)) == len(labels), f"labels of {field}", labels)
    if found.get("audit") is not None:
        for name in ("rows", "entries", "rounds"):
            _whole(found["audit"][name], f"audit.{name}", 0, ROWS_MAX)
        share = found["audit"]["missed_share"]
        expect(isinstance(share, float | int) and 0 <= share <= 1, "a missed share", share)
        for each in found["audit"].get("efforts", ()):
            fits = all(isinstance(value, float | int) for value in each) and len(each) == 3
            fits = fits and each[0] >= 1 and 0 <= min(each[1:]) and max(each[1:]) <= 1
            expect(fits, "the length of a routing list and two shares", each)
    for each in found["sections"]:
        section(each, found["storage"])


def section(found: Mapping[str, Any], storage: str) -> int:
    """Type, shape and place of a section; its size in bytes."""
    name, shape = found["name"], found["shape"]
    dtype, axes = (
        (_VECTORS[storage], 2) if name == "vectors" else _DTYPES[name.partition(":")[0]]
    )  # fmt: skip
    expect(found["dtype"] == dtype, f"{dtype} in section {name}", found["dtype"])
    expect(isinstance(shape, list) and len(shape) == axes, f"{axes} axes of {name}", shape)
    for size in shape:
        _whole(size, f"the shape of {name}", 0, 2**48)
    _whole(found["offset"], f"the offset of {name}", 0, 2**62)
    expect(found["offset"] % PAGE == 0, f"whole pages before {name}", found["offset"])
    size_bytes: int = math.prod(shape) * np.dtype(dtype).itemsize
    return size_bytes


def arrays(header: Mapping[str, Any], found: Mapping[str, Array]) -> None:
    """Whether sections fit each other, and point to what is there."""
    rows, dim, graph = header["rows"], header["dim"], found["graph"]
    linked = len(graph)
    _shape(found, "vectors", (rows, padded(dim)))
    _shape(found, "ids", (2, rows))
    expect(linked <= rows and graph.shape[1] == header["degree"], "a graph of rows", graph.shape)
    _within(graph, "graph", linked)
    _within(found["entries"], "entries", linked)
    if "chain" in found:
        _shape(found, "chain", (linked, 1))
        rest = np.flatnonzero(found["chain"][:, 0] != NOWHERE)
        following = found["chain"][rest, 0]
        ascends = bool((following > rest).all() and (following < linked).all())
        expect(ascends, "a chain that ascends to its end", following)
    expect(len(found["entries"]) > 0 or not linked, "entry points", 0)
    _within(found["dead"], "dead", rows)
    dead = np.unique(found["dead"])
    expect(len(dead) == len(found["dead"]) == rows - header["live"], "each dead row once", dead)
    _ids(found["ids"][0], found["ids"][1], len(found["id_bytes"]))
    if "payload_ends" in found:
        _shape(found, "payload_ends", (rows,))
        _ends(found["payload_ends"], len(found["payload_bytes"]), "payloads")
    for name, column in found.items():
        kind, _, field = name.partition(":")
        if kind in ("number", "code"):
            expect(len(column) <= rows, f"at most {rows} values in {name}", len(column))
        least = {"code": -1, "code_more": 0}.get(kind)
        if least is not None and len(column):
            most = len(header["labels"][field])
            expect(column.min() >= least and column.max() < most, f"labels in {name}", column.max())
        if kind in ("number_more", "code_more"):
            base = kind.removesuffix("_more")
            of = found[f"{base}_rows:{field}"]
            expect(len(of) == len(column), f"a row for each value in {name}", len(of))
            expect(bool((np.diff(of) >= 0).all()), f"{name} in order of rows", of)
            _within(of, name, len(found[f"{base}:{field}"]))
    for first in range(0, rows, _BLOCK_ROWS):
        block = found["vectors"][first : first + _BLOCK_ROWS].astype(np.float64)
        squares = np.einsum("ij,ij->i", block, block)
        expect(bool((squares <= SQUARES_MAX).all()), "finite vectors", f"rows from {first} on")


def ids(found: list[ExternalId], dead: list[int]) -> None:
    """Whether no two live rows have the same id."""
    gone = set(dead)
    live = {each for row, each in enumerate(found) if row not in gone}
    expect(len(live) == len(found) - len(gone), "a live id once", len(live))


def expect(holds: bool, expected: str, found: Any) -> None:
    """Raise ValueError unless it holds."""
    if not holds:
        raise ValueError(f"expected {expected}, found {found!r:.80}")


def _ids(kinds: Array, ends: Array, size: int) -> None:
    lengths = np.diff(ends, prepend=0)
    expect(bool(np.isin(kinds, (0, 1, 2)).all()), "ids of kind 0, 1 or 2", kinds)
    _ends(ends, size, "ids")
    expect(bool((lengths[kinds == 0] == 8).all()), "8 bytes of each number", lengths)


def _ends(ends: Array, size: int, name: str) -> None:
    lengths = np.diff(ends, prepend=0)
    expect(bool((lengths >= 0).all()), f"{name} one after the other", ends)
    expect((int(ends[-1]) if len(ends) else 0) == size, f"{name} that use all their bytes", size)


def _shape(found: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> None:
    expect(found[name].shape == shape, f"{name} of shape {shape}", found[name].shape)


def _within(found: Array, name: str, most: int) -> None:
    if found.size:
        inside = found.min() >= 0 and found.max() < most
        expect(bool(inside), f"rows below {most} in {name}", (found.min(), found.max()))


def _whole(found: Any, name: str, least: int, most: int) -> None:
    right = type(found) is int and least <= found <= most
    expect(right, f"{name} from {least} to {most}", found)
