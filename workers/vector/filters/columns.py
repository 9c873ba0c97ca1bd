"""Metadata of rows by column, so that a filter is a few array operations.

A column has numbers (float64) or labels (strings and booleans, stored as codes). The first value
decides the kind; a value of the other kind is refused. No comparison holds for a row without a
value. A row may have a list of values: a comparison that holds for one of them holds for the row.
The first value is in the column, the others are in `extras` with their rows, so that a cached
filter only compares those of new rows. Labels that are dates are also stored as times, for ranges.
"""

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from schemas.errors import UnknownFilterField
from schemas.rules.filters import Value, moment_us
from schemas.rules.metadata import TENANT, Metadata, check_metadata, is_number, values_of
from workers.vector.filters.extra_values import ExtraValues, ValueTest
from workers.vector.filters.parts import ShardedDict, in_parts, take
from workers.vector.kernels.arrays import Array

_NONE = -1  # the code of rows without a label
_NO_MOMENT = np.iinfo(np.int64).min  # the time of labels that are no dates
_COMPARED_MAX = 16  # values that are compared one by one; more are sorted


class ColumnStore:
    """Values of up to `FIELDS_MAX` fields for a growing number of rows."""

    def __init__(self) -> None:
        self.numbers: dict[str, Array] = {}
        self.label_codes: dict[str, Array] = {}
        self.labels: dict[str, ShardedDict[str | bool]] = {}  # codes by label
        self.names: dict[str, list[str | bool]] = {}  # labels by code
        self.extras: dict[str, ExtraValues] = {}  # numbers, or codes of labels
        self._moments: dict[str, Array] = {}  # us since 1970 by code, of fields that have dates

    @property
    def bytes_held(self) -> int:
        """Return the bytes of the values, without the texts of labels."""
        columns = [*self.numbers.values(), *self.label_codes.values(), *self._moments.values()]
        extras = [*self.extras.values()]
        return sum(column.nbytes for column in columns) + sum(extra.bytes_held for extra in extras)

    @property
    def extra_count(self) -> int:
        """Return the number of values beyond each row's first, in the field with the most."""
        return max((len(extra.arrays[0]) for extra in [*self.extras.values()]), default=0)

    def check(self, rows: Sequence[Metadata]) -> None:
        """Raise InvalidRequest if `append` cannot store these rows."""
        kinds = dict.fromkeys(self.numbers, True) | dict.fromkeys(self.label_codes, False)
        for row in rows:
            check_metadata(row, kinds)

    def kinds_changed(self, rows: Sequence[Metadata]) -> set[str]:
        """Return the fields whose kind differs from that of these rows' values."""
        changed_fields = set()
        for row in rows:
            for field, raw_value in row.items():
                for value in values_of(raw_value)[:1]:
                    if field in (self.label_codes if is_number(value) else self.numbers):
                        changed_fields.add(field)
        return changed_fields

    def without(self, fields: Container[str]) -> "ColumnStore":
        """Return the columns without these fields; only one of the two stores may grow later."""
        out = ColumnStore()
        for name in ("numbers", "label_codes", "labels", "names", "extras", "_moments"):
            by_field = getattr(self, name)
            setattr(
                out,
                name,
                {field: column for field, column in by_field.items() if field not in fields},
            )
        return out

    def append(self, first: int, rows: Sequence[Metadata], capacity: int) -> None:
        """Append metadata of rows, from number `first` on; columns get room for `capacity` rows."""
        for at, row in enumerate(rows, first):
            for field, raw_value in row.items():
                for number, value in enumerate(values_of(raw_value)):
                    if is_number(value):
                        cell: Any = value
                        column = self._grow(self.numbers, field, np.nan, np.float64, capacity)
                    else:
                        cell = self._code(field, value)  # type: ignore[arg-type]  # a label
                        column = self._grow(self.label_codes, field, _NONE, np.int32, capacity)
                    if number == 0:
                        column[at] = cell
                    else:
                        if (extra := self.extras.get(field)) is None:
                            extra = ExtraValues(np.empty(0, np.int64), np.empty(0, column.dtype))
                            self.extras[field] = extra
                        extra.add(at, cell)

    def _code(self, field: str, label: str | bool) -> int:
        """Return the code of a label, adding a new one."""
        if (labels := self.labels.get(field)) is None:
            self.names[field], self.labels[field] = [], (labels := ShardedDict())
        code: int | None = labels.get(label)
        if code is None:
            names = self.names[field]
            code = len(names)
            self._add_dates(field, [label], code)
            names.append(label)
            labels[label] = code
        return code

    def keep_labels(self, field: str, labels: list[str | bool]) -> None:
        """Set all labels of a field, by code; the list is stored without a copy."""
        table = ShardedDict[str | bool]()
        for first, last in in_parts(len(labels)):
            part = labels[first:last]
            self._add_dates(field, part, first)
            for code, label in enumerate(part, first):
                table[label] = code
        self.names[field], self.labels[field] = labels, table

    def _add_dates(self, field: str, labels: Sequence[str | bool], first: int) -> None:
        """Store the times of labels that are dates; the labels have codes from `first` on."""
        dates = [moment_us(label) if isinstance(label, str) else None for label in labels]
        count = first + len(dates)
        if field in self._moments or any(date is not None for date in dates):
            length = max(count, 2 * first)
            moments = self._grow(self._moments, field, _NO_MOMENT, np.int64, count, length)
            moments[first:count] = [_NO_MOMENT if date is None else date for date in dates]

    def _grow(
        self, columns: dict[str, Array], field: str, empty: Any, dtype: Any, capacity: int,
        length: int = 0,
    ) -> Array:  # fmt: skip
        column = columns.get(field)
        if column is None or len(column) < capacity:
            new_column: Array = np.full(max(length, capacity), empty, dtype)
            if column is not None:
                new_column[: len(column)] = column
            columns[field] = column = new_column
        return column

    def take(self, rows: Array) -> "ColumnStore":
        """Return the columns of these rows, in this order.

        Fields and labels that none of them has are dropped: replaced documents add new ones all
        the time.
        """
        out = ColumnStore()
        extras = {field: extra.take(rows) for field, extra in self.extras.items()}
        out.extras = {field: extra for field, extra in extras.items() if len(extra.arrays[0])}
        for field, column in self.numbers.items():
            numbers = _column(column, rows, np.nan)
            if not np.isnan(numbers).all():
                out.numbers[field] = numbers
        for field, column in self.label_codes.items():
            codes, names = _column(column, rows, _NONE), self.names[field]
            count = len(names)
            extra = out.extras.get(field)
            all_codes = codes if extra is None else np.concatenate([codes, extra.arrays[1]])
            used = np.flatnonzero(np.bincount(all_codes + 1, minlength=count + 1)[1:])
            if len(used):
                renumbered = np.full(count + 1, _NONE, np.int32)
                renumbered[used + 1] = np.arange(len(used))
                out.label_codes[field] = renumbered[codes + 1]
                if extra is not None:
                    extra_rows, extra_codes = extra.arrays
                    out.extras[field] = ExtraValues(extra_rows, renumbered[extra_codes + 1])
                out.keep_labels(field, take(names, used))
        return out

    def equal(self, field: str, values: Sequence[Value], first: int, last: int) -> Array:
        """Return which of rows `first` to `last` have one of these values: (rows,), bool.

        Raises UnknownFilterField if no row has the field, or its values are of another kind.
        """
        targets: list[Any]
        if field in self.numbers:
            targets = [v for v in values if self._fits(field, v, number=True)]
        else:
            labels = self._labels(field)
            targets = [
                labels[v]  # type: ignore[index]  # a label
                for v in values
                if self._fits(field, v, number=False) and v in labels
            ]
        return self._rows(field, first, last, lambda part: _one_of(part, targets))

    def between(
        self, field: str, low: float | None, high: float | None, first: int, last: int
    ) -> Array:
        """Return which of rows `first` to `last` have a number in [low, high]: (rows,), bool.

        None leaves a side open. Raises UnknownFilterField.
        """
        if field not in self.numbers:
            self._labels(field)
            raise UnknownFilterField(
                f"field {field!r} holds labels; a range needs numbers, or dates as its bounds"
            )
        return self._rows(
            field, first, last, lambda part: _inside(part, low, high, ~np.isnan(part))
        )

    def dated(self, field: str, low: int | None, high: int | None, first: int, last: int) -> Array:
        """Return which rows have a date in [low, high], in microseconds since 1970."""
        if field in self.numbers:
            raise UnknownFilterField(f"field {field!r} holds numbers; the range is of dates")
        self._labels(field)
        moments = self._moments.get(field)

        def matches(codes: Array) -> Array:
            if moments is None:
                return np.zeros(len(codes), np.bool_)
            dates = np.where(codes < 0, _NO_MOMENT, moments[codes])
            return _inside(dates, low, high, dates != _NO_MOMENT)

        return self._rows(field, first, last, matches)

    def present(self, field: str, first: int, last: int) -> Array:
        """Return which of rows `first` to `last` have a value: (rows,), bool."""
        if field in self.numbers:
            return ~np.isnan(_part(self.numbers[field], first, last, np.nan))
        if field not in self.label_codes:
            return np.zeros(last - first, np.bool_)
        has: Array = _part(self.label_codes[field], first, last, _NONE) != _NONE
        return has

    def _rows(self, field: str, first: int, last: int, matches: ValueTest) -> Array:
        """Return which of rows `first` to `last` have a value that `matches` accepts."""
        is_number = field in self.numbers
        column = self.numbers[field] if is_number else self.label_codes[field]
        mask = matches(_part(column, first, last, np.nan if is_number else _NONE))
        if (extra := self.extras.get(field)) is not None:
            extra.mark(mask, first, last, matches)
        return mask

    def has_or_lacks(self, field: str, value: Value, row: int) -> bool:
        """Return whether a row has this label in a field of labels, or has none."""
        codes = self.label_codes.get(field, ())
        code = codes[row] if row < len(codes) else _NONE
        labels = self.labels.get(field)
        return bool(code == _NONE or (labels is not None and code == labels.get(value)))

    def _labels(self, field: str) -> ShardedDict[str | bool]:
        if field not in self.label_codes:
            fields = [*self.numbers, *self.label_codes]
            names = ", ".join(sorted(name for name in fields if name != TENANT)) or "none"
            raise UnknownFilterField(f"no row has a field {field!r}; fields are: {names}")
        return self.labels[field]

    def _fits(self, field: str, value: Value, *, number: bool) -> bool:
        if is_number(value) != number:
            kinds = "numbers" if number else "labels"
            raise UnknownFilterField(f"field {field!r} holds {kinds}, the filter has {value!r}")
        return True


def _inside(values: Array, low: float | None, high: float | None, inside: Array) -> Array:
    """Return which values are `inside`, bool, and in [low, high]; None leaves a side open."""
    if low is not None:
        inside &= values >= low
    if high is not None:
        inside &= values <= high
    return inside


def _one_of(column: Array, values: Sequence[Any]) -> Array:
    """Return which of a column's values are among `values`: bool."""
    if len(values) > _COMPARED_MAX:
        return np.isin(column, values)
    mask = np.zeros(len(column), np.bool_)
    for value in values:
        mask |= column == value
    return mask


def _part(column: Array, first: int, last: int, empty: Any) -> Array:
    """Return the values of rows `first` to `last`; a column may be shorter than that."""
    part = column[first:last]
    if len(part) == last - first:
        return part
    return np.concatenate([part, np.full(last - first - len(part), empty, column.dtype)])


def _column(column: Array, rows: Array, empty: Any) -> Array:
    out = np.full(len(rows), empty, column.dtype)
    inside = rows < len(column)
    out[inside] = column[rows[inside]]
    return out
