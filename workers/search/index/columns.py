"""Metadata of rows by column, so that a filter is a few array operations.

A column holds numbers (float64) or labels (text and truth values, kept as small integers). The
first value decides which; a value of the other kind is refused. Rows without a value have none: no
comparison holds for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest, UnknownFilterField
from workers.search.kernels.arrays import Array

Value = str | bool | int | float

_NONE = -1  # the code of rows that have no label
COLUMNS_MAX = 64
TENANT = "$tenant"  # a column of ours; no filter expression can name it
_EXACT_MAX = 2**53


class Columns:
    """Values of up to `COLUMNS_MAX` fields for a growing number of rows."""

    def __init__(self) -> None:
        self.numbers: dict[str, Array] = {}
        self.label_codes: dict[str, Array] = {}
        self.labels: dict[str, dict[str | bool, int]] = {}

    def check(self, rows: Sequence[Mapping[str, Value]]) -> None:
        """Raise InvalidRequest where `append` could not keep these."""
        kinds = dict.fromkeys(self.numbers, True) | dict.fromkeys(self.label_codes, False)
        for row in rows:
            for field, value in row.items():
                if not isinstance(value, str | bool | int | float):
                    raise InvalidRequest(
                        f"expected text, a number or a truth value in field {field!r}, found "
                        f"{type(value).__name__}", "metadata",
                    )  # fmt: skip
                numeric = is_number(value)
                if kinds.setdefault(field, numeric) != numeric:
                    expected = "numbers" if kinds[field] else "labels"
                    raise InvalidRequest(
                        f"field {field!r} holds {expected}, found {value!r}", "metadata"
                    )
                if numeric and not abs(value) <= _EXACT_MAX:  # type: ignore[arg-type]  # a number
                    raise InvalidRequest(
                        f"expected numbers within +-2**53 in field {field!r}, found {value!r}; "
                        "store it as text", "metadata",
                    )  # fmt: skip
        if len(kinds) > COLUMNS_MAX:
            raise InvalidRequest(
                f"expected at most {COLUMNS_MAX} metadata fields, found {len(kinds)}", "metadata"
            )

    def append(self, first: int, rows: Sequence[Mapping[str, Value]], capacity: int) -> None:
        """Values of rows `first` and on; `capacity` is how many rows may come before it grows."""
        for at, row in enumerate(rows, first):
            for field, value in row.items():
                if is_number(value):
                    self._grown(self.numbers, field, np.nan, np.float64, capacity)[at] = value
                    continue
                labels = self.labels.setdefault(field, {})
                code = labels.setdefault(value, len(labels))  # type: ignore[arg-type]  # a label
                self._grown(self.label_codes, field, _NONE, np.int32, capacity)[at] = code

    def _grown(
        self, columns: dict[str, Array], field: str, empty: Any, dtype: Any, capacity: int
    ) -> Array:
        column = columns.get(field)
        if column is None or len(column) < capacity:
            grown: Array = np.full(capacity, empty, dtype)
            if column is not None:
                grown[: len(column)] = column
            columns[field] = column = grown
        return column

    def taken(self, rows: Array) -> "Columns":
        """The same for these rows only, in this order."""
        out = Columns()
        out.labels = {field: dict(labels) for field, labels in self.labels.items()}
        for source, target, empty in (
            (self.numbers, out.numbers, np.nan),
            (self.label_codes, out.label_codes, _NONE),
        ):
            for field, column in source.items():
                target[field] = _column(column, rows, empty)
        return out

    def equal(self, field: str, values: Sequence[Value], count: int) -> Array:
        """Which of the first `count` rows have one of these values: shape (count,), bool.

        Raises UnknownFilterField where no row has the field, or it holds values of another kind.
        """
        if field in self.numbers:
            wanted = [v for v in values if self._fits(field, v, number=True)]
            return np.isin(_first(self.numbers[field], count, np.nan), wanted)
        labels = self._labels(field)
        codes = [
            labels[v]  # type: ignore[index]  # a label
            for v in values
            if self._fits(field, v, number=False) and v in labels
        ]
        return np.isin(_first(self.label_codes[field], count, _NONE), codes)

    def between(self, field: str, low: float | None, high: float | None, count: int) -> Array:
        """Which of the first `count` rows are in [low, high]; None leaves a side open.

        Shape (count,), bool. Raises what `equal` does.
        """
        if field not in self.numbers:
            self._labels(field)
            raise UnknownFilterField(f"field {field!r} holds labels; a range needs numbers")
        values = _first(self.numbers[field], count, np.nan)
        inside = ~np.isnan(values)
        if low is not None:
            inside &= values >= low
        if high is not None:
            inside &= values <= high
        return inside

    def unset(self, field: str, count: int) -> Array:
        """Which of the first `count` rows have no label: shape (count,), bool."""
        if field not in self.label_codes:
            return np.ones(count, np.bool_)
        codes = _first(self.label_codes[field], count, _NONE)
        is_none: Array = codes == _NONE
        return is_none

    def has_or_lacks(self, field: str, value: Value, row: int) -> bool:
        """Whether a row has this label in a field of labels, or none."""
        codes = self.label_codes.get(field, ())
        code = codes[row] if row < len(codes) else _NONE
        return bool(code in (_NONE, self.labels.get(field, {}).get(value)))  # type: ignore[arg-type]  # a label

    def _labels(self, field: str) -> dict[str | bool, int]:
        if field not in self.label_codes:
            named = [*self.numbers, *self.label_codes]
            known = ", ".join(sorted(each for each in named if each != TENANT)) or "none"
            raise UnknownFilterField(f"no row has a field {field!r}; fields are: {known}")
        return self.labels[field]

    def _fits(self, field: str, value: Value, *, number: bool) -> bool:
        if is_number(value) != number:
            held = "numbers" if number else "labels"
            raise UnknownFilterField(f"field {field!r} holds {held}, the filter has {value!r}")
        return True


def is_number(value: Value) -> bool:
    """Whether a value goes to a column of numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first(column: Array, count: int, empty: Any) -> Array:
    """The first `count` values; a column may be younger than the last rows."""
    if len(column) >= count:
        return column[:count]
    return np.concatenate([column, np.full(count - len(column), empty, column.dtype)])


def _column(column: Array, rows: Array, empty: Any) -> Array:
    out = np.full(len(rows), empty, column.dtype)
    held = rows < len(column)
    out[held] = column[rows[held]]
    return out
