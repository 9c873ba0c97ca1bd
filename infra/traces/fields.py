"""Lines of trace files, and what they hold by name; whatever is wrong is told with its line."""

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
_INT_MAX = 1 << 64  # block hashes are that large


class Fields:
    """One line, or an object in it. A name may have aliases: the first that is there counts."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def has(self, *names: str) -> bool:
        """Whether any of them is there; null and an empty cell are not."""
        return self._find(names) not in (None, "")

    def count(self, *names: str, least: int = 0) -> int:
        """A whole number, also as text; raises ConfigError."""
        return self._whole(self._find(names), names[0], least)

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        found = self.values.get(name)
        if not isinstance(found, list):
            raise self.wrong(name, "a list of whole numbers", found)
        return tuple(self._whole(each, name, 0) for each in found)

    def number(self, *names: str) -> float:
        """A finite number from 0, also as text."""
        found = self._find(names)
        try:
            number = float(found) if not isinstance(found, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise self.wrong(names[0], "a number from 0", found)
        return number

    def text(self, *names: str) -> str:
        """Text that is not empty."""
        found = self._find(names)
        if not isinstance(found, str) or not found:
            raise self.wrong(names[0], "text", found)
        return found

    def inner(self, name: str) -> "Fields":
        """The object of that name."""
        return self._object(self.values.get(name), name)

    def objects(self, name: str) -> list["Fields"]:
        """A list of objects; none where it is missing."""
        found = self.values.get(name) or []
        if not isinstance(found, list):
            raise self.wrong(name, "a list", found)
        return [self._object(each, name) for each in found]

    def wrong(self, name: str, expected: str, found: object) -> ConfigError:
        """What to raise."""
        said = "nothing" if found is None or found == "" else repr(found)[:_SHOWN_CHARS]
        return ConfigError(f"{self.where}: {name}: expected {expected}, found {said}")

    def _find(self, names: Sequence[str]) -> Any:
        return next((self.values[name] for name in names if name in self.values), None)

    def _whole(self, found: Any, name: str, least: int) -> int:
        text = found.strip() if isinstance(found, str) else ""
        if text.isascii() and text.isdecimal():
            found = int(text)
        if type(found) is not int or not least <= found < _INT_MAX:
            raise self.wrong(name, f"a whole number from {least}", found)
        return found

    def _object(self, found: Any, name: str) -> "Fields":
        if not isinstance(found, dict):
            raise self.wrong(name, "an object", found)
        return Fields(found, self.where)


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file's text; one whose name ends in .gz is unpacked."""
    try:
        with opener(path)(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: expected text as UTF-8, or gzip in .gz: {error}") from error


def opener(path: Path) -> Any:
    """`open`, or that of gzip."""
    return gzip.open if path.suffix == ".gz" else open


def json_lines(path: Path) -> Iterator[Fields]:
    """The objects of a file with one on each line; empty lines are passed over."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield json_object(line, f"{path}:{number}")


def json_object(text: str, where: str) -> Fields:
    """What a text holds."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected an object of JSON, found {text[:_SHOWN_CHARS]!r}")
    return Fields(found, where)


def csv_rows(path: Path) -> Iterator[Fields]:
    """The rows of a file whose first line names the columns."""
    with opened(path) as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                yield Fields(row, f"{path}:{reader.line_num}")
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.line_num}: expected CSV: {error}") from error
