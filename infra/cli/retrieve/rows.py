"""Reads the files of vectors that users name, for the commands that take them.

A .npy file has one vector in each row, and the row's number is its id. A line of a .jsonl file is
`{"id": "a", "vector": [0.1, 0.2], "metadata": {"year": 2020}, "text": "..."}`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from schemas.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from schemas.rules.metadata import Kinds, Metadata


class VectorRow(NamedTuple):
    """A vector, float32 of shape (values,), with its id, metadata and text."""

    id: str
    vector: Any
    metadata: str = ""  # as JSON
    text: str = ""


Rows = Iterator[tuple[str, VectorRow | str]]  # (place, row); in place of a bad row, the error


def read_array(path: Path) -> Any:
    """Return the array of numbers in a .npy file, memory-mapped; raises ConfigError for others."""
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:  # numpy's message would advise to unpickle the file
        raise ConfigError(
            f"{path}: expected a .npy file with numbers, as numpy.save writes it, found another"
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        kind = getattr(array, "dtype", "several arrays, an .npz file")
        raise ConfigError(f"{path}: expected one array of numbers, found {kind}")
    return array


def read_rows(path: Path) -> Any:
    """Return the array of a .npy file, checked to have shape (rows, values)."""
    array = read_array(path)
    if array.ndim != 2 or not array.shape[1]:
        raise ConfigError(f"{path}: expected numbers in rows, found shape {array.shape}")
    return array


def read_vector(path: Path) -> Any:
    """Return the vector of a .npy file, of shape (values,); a single row counts as one."""
    array = read_array(path)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ConfigError(f"{path}: expected one vector, found shape {array.shape}")
    return array


def open_rows(file: Path) -> tuple[int, Rows]:
    """Return the number of rows and the rows, which are checked as they are read."""
    try:
        if file.suffix == ".npy":
            vectors = read_rows(file)
            return len(vectors), _npy_rows(file, vectors)
        if file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                return sum(1 for line in lines if line.strip()), _json_rows(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    raise ConfigError(f"{file}: expected a file that ends in .npy or .jsonl")


def _npy_rows(file: Path, vectors: Any) -> Rows:
    import numpy as np

    for row, vector in enumerate(vectors):
        wrong = "" if np.isfinite(vector).all() else "expected finite values, found others"
        yield f"{file}, row {row}", wrong or VectorRow(str(row), vector)


def _json_rows(file: Path) -> Rows:
    kinds: Kinds = {}
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row: VectorRow | str = _row(json.loads(line, parse_float=str.encode), kinds)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                row = (
                    "expected an object with an id, a vector of numbers and perhaps metadata: "
                    f"{reason}"
                )
            except InvalidRequest as error:
                row = error.message
            yield f"{file}, line {number}", row


def _row(fields: Any, kinds: "Kinds") -> VectorRow:
    """Return the row of a line; raises InvalidRequest, or what Python raises, for an invalid one.

    Floats come as bytes, so that those of metadata keep their digits; a vector's are rounded
    anyway.
    """
    import numpy as np

    from schemas.rules.metadata import check_metadata, metadata_of
    from schemas.rules.numbers import float_of

    if not isinstance(fields, dict):
        raise TypeError("it is none")
    row_id, metadata = fields["id"], fields.get("metadata") or {}
    if not isinstance(row_id, str | int) or isinstance(row_id, bool) or row_id == "":
        raise TypeError("the id is no string nor a whole number")
    name = str(row_id)
    name.encode()
    if not isinstance(fields["vector"], list) or not isinstance(metadata, dict):
        raise TypeError("the vector is no list, or the metadata no object")
    with np.errstate(over="ignore"):
        vector = np.array([float(value) for value in fields["vector"]], np.float32)
    if not len(vector) or not np.isfinite(vector).all():
        raise ValueError("the vector is empty, or has values that float32 does not hold")
    facts = json.dumps(metadata, default=lambda digits: float_of(digits.decode()))
    facts, new_kinds = facts if metadata else "", dict(kinds)
    check_metadata(metadata_of(facts), new_kinds)
    kinds |= new_kinds
    text = fields.get("text") or ""
    if not isinstance(text, str):
        raise TypeError("the text is no string")
    text.encode()
    return VectorRow(name, vector, facts, text)


@dataclass(frozen=True, slots=True)
class WholeFile:
    """All rows of a file: vectors of shape (rows, values), with ids, metadata and payloads."""

    vectors: Any
    ids: list[str]
    metadata: "list[Metadata] | None" = None
    payloads: list[bytes] | None = None

    def part(self, first: int, step: int) -> "WholeFile":
        """Return every `step`th row, from the first one on."""
        metadata, payloads = self.metadata, self.payloads
        return WholeFile(
            self.vectors[first::step],
            self.ids[first::step],
            metadata and metadata[first::step],
            payloads and payloads[first::step],
        )


def read_whole(file: Path) -> WholeFile:
    """Return all rows of a .npy or .jsonl file; raises ConfigError, also for one invalid line."""
    import numpy as np

    from schemas.rules.metadata import metadata_of
    from workers.retrieval.passages.texts import payload_of_text

    if file.suffix != ".jsonl":
        vectors = read_rows(file)
        return WholeFile(vectors, [str(row) for row in range(len(vectors))])
    rows: list[VectorRow] = []
    for place, row in open_rows(file)[1]:
        if isinstance(row, str):
            raise ConfigError(f"{place}: {row}")
        if rows and len(row.vector) != len(rows[0].vector):
            raise ConfigError(
                f"{place}: expected a vector of {len(rows[0].vector)} values, as in the first row, "
                f"found {len(row.vector)}"
            )
        rows.append(row)
    if not rows:
        raise ConfigError(f"{file}: expected at least one row, found none")
    return WholeFile(
        np.stack([row.vector for row in rows]),
        [row.id for row in rows],
        [metadata_of(row.metadata) for row in rows],
        [payload_of_text(row.id, row.text) for row in rows],
    )
