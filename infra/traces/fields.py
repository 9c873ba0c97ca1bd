"""Reads lines of trace files and their fields by name; errors name the line."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from schemas.errors import ConfigError

_SHOWN_CHARS = 40
_INT_MAX = 1 << 64  # block hashes have up to 64 bits


class Fields:
    """One line, or an object in it. A name may have aliases: the first one present counts."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def has(self, *names: str) -> bool:
        """Return whether any of the fields is present; null and an empty cell do not count."""
        return self._find(names) not in (None, "")

    def count(self, *names: str, minimum: int = 0) -> int:
        """Return a whole number, also from text. Raises ConfigError."""
        return self._whole(self._find(names), names[0], minimum)

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers. Raises ConfigError."""
        numbers = self.values.get(name)
        if not isinstance(numbers, list):
            raise self.error(name, "a list of whole numbers", numbers)
        return tuple(self._whole(number, name, 0) for number in numbers)

    def number(self, *names: str) -> float:
        """Return a finite number from 0, also from text. Raises ConfigError."""
        value = self._find(names)
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise self.error(names[0], "a number from 0", value)
        return number

    def text(self, *names: str) -> str:
        """Return a text that is not empty. Raises ConfigError."""
        value = self._find(names)
        if not isinstance(value, str) or not value:
            raise self.error(names[0], "text", value)
        return value

    def inner(self, name: str) -> "Fields":
        """Return the object of that name. Raises ConfigError."""
        return self._object(self.values.get(name), name)

    def objects(self, name: str) -> list["Fields"]:
        """Return a list of objects, empty where it is missing. Raises ConfigError."""
        objects = self.values.get(name) or []
        if not isinstance(objects, list):
            raise self.error(name, "a list", objects)
        return [self._object(value, name) for value in objects]

    def error(self, name: str, expected: str, value: object) -> ConfigError:
        """Return the error for a field with a wrong value."""
        shown_text = "nothing" if value is None or value == "" else repr(value)[:_SHOWN_CHARS]
        return ConfigError(f"{self.where}: {name}: expected {expected}, found {shown_text}")

    def _find(self, names: Sequence[str]) -> Any:
        return next((self.values[name] for name in names if name in self.values), None)

    def _whole(self, value: Any, name: str, minimum: int) -> int:
        text = value.strip() if isinstance(value, str) else ""
        if text.isascii() and text.isdecimal():
            value = int(text)
        if type(value) is not int or not minimum <= value < _INT_MAX:
            raise self.error(name, f"a whole number from {minimum}", value)
        return value

    def _object(self, value: Any, name: str) -> "Fields":
        if not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return Fields(value, self.where)


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file; a file whose name ends in .gz is decompressed."""
    try:
        with opener(path)(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: expected text as UTF-8, or gzip in .gz: {error}") from error


def opener(path: Path) -> Any:
    """Return `open`, or `gzip.open` for a name in .gz."""
    return gzip.open if path.suffix == ".gz" else open


def json_lines(path: Path) -> Iterator[Fields]:
    """Yield the objects of a file with one on each line; empty lines are skipped."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield json_object(line, f"{path}:{number}")


def json_object(text: str, where: str) -> Fields:
    """Parse a text that holds one JSON object."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: expected an object of JSON, found {text[:_SHOWN_CHARS]!r}")
    return Fields(document, where)


def csv_rows(path: Path) -> Iterator[Fields]:
    """Yield the rows of a file whose first line names the columns."""
    with open_text(path) as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                yield Fields(row, f"{path}:{reader.line_num}")
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.line_num}: expected CSV: {error}") from error
