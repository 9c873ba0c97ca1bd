"""Files of records: JSON, JSON lines, and tables with commas, tabs or semicolons."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from schemas.rules.numbers import float_of
from streams.parsing.charset import decoded
from streams.parsing.parsed import TEXT_CHARS_MAX, Parsed, Unreadable

_CELL_CHARS_MAX = 1 << 20
_SAMPLE_CHARS, _SAMPLE_ROWS = 65_536, 20  # by which the sign between values is known
_DELIMITERS = ",;\t|"
_NUMBER = re.compile(r"[\s\d.,:/%€$£+-]*")
csv.field_size_limit(_CELL_CHARS_MAX)


def json_lines(data: bytes) -> Iterator[Parsed]:
    """One document per line: `{"id": "a", "text": "…", "title": "…", "metadata": {…}}`.

    A line without an id has its number for one. Lines that give no document say why.
    """
    for number, line in enumerate(decoded(data).split("\n"), 1):
        if line.strip():
            place = f"line {number}"
            try:
                yield _of_line(json.loads(line, parse_float=float_of), place)
            except (ValueError, RecursionError) as error:
                yield Parsed("", place=place, wrong=f"expected a JSON object: {error}")
            except Unreadable as error:
                yield Parsed("", place=place, wrong=str(error))


def _of_line(found: Any, place: str) -> Parsed:
    if not isinstance(found, dict):
        raise Unreadable("expected a JSON object with a text")
    if found.get("vector"):
        raise Unreadable("found a vector; `trivium documents load` takes documents with vectors")
    name, text, metadata = found.get("id"), found.get("text"), found.get("metadata") or {}
    if not isinstance(name, str | int | None) or isinstance(name, bool) or name == "":
        raise Unreadable("expected an id, a string or a whole number")
    shown = "" if name is None else f"document {name!r:.80}: "
    if not isinstance(text, str):
        raise Unreadable(f"{shown}expected a text")
    title, tenant = found.get("title") or "", found.get("tenant") or ""
    fits = isinstance(metadata, dict) and isinstance(title, str) and isinstance(tenant, str)
    if not fits:
        raise Unreadable(f"{shown}expected strings as title and tenant, an object as metadata")
    try:
        f"{name}{text}{title}{tenant}".encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"{shown}expected characters: {error.reason}") from None
    document_id = "" if name is None else str(name)
    return Parsed(text, title, document_id, tenant, metadata, place)


def json_text(data: bytes) -> Parsed:
    """A line for each value, behind its path: `price.amount: 12.50`; numbers keep their digits."""
    source = decoded(data)
    try:
        found = json.loads(source, parse_float=str, parse_int=str, parse_constant=str)
        text = _joined(_lines(found, ""))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected JSON: {error}") from None
    return Parsed(text.encode(errors="replace").decode())


def _joined(lines: Iterable[str]) -> str:
    """Paths and names of columns are repeated, so a small file may have a long text; raises
    Unreadable."""
    found, chars = list[str](), 0
    for line in lines:
        found.append(line)
        chars += len(line) + 1
        if chars > TEXT_CHARS_MAX:
            raise Unreadable(f"expected at most {TEXT_CHARS_MAX} characters of text; divide it")
    return "\n".join(found)


def _lines(value: Any, path: str) -> Iterator[str]:
    """A blank line stands between the entries of an outermost list, which are records as a rule."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        if all(not isinstance(inner, dict | list) for inner in value):
            said = ", ".join(_spelled(inner) for inner in value)
            yield from _line(said, path)
            return
        for number, inner in enumerate(value):
            if not path and number:
                yield ""
            yield from _lines(inner, f"{path}[{number}]" if path else "")
    else:
        yield from _line(_spelled(value), path)


def _line(said: str, path: str) -> Iterator[str]:
    if said.strip():
        yield f"{path}: {said}" if path else said


def _spelled(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def table(data: bytes) -> Parsed:
    """A line for each row; where the first one names the columns, with the names."""
    source = decoded(data)
    delimiter = max(_DELIMITERS, key=lambda sign: _alike(source[:_SAMPLE_CHARS], sign))
    rows = (row for row in _rows(source, delimiter) if any(map(str.strip, row)))
    return Parsed(_joined(_of_rows(rows)))


def _alike(sample: str, delimiter: str) -> tuple[int, int]:
    """How many of the first rows have as many values as most of them, and how many these are."""
    widths = [len(row) for row in islice(_rows(sample, delimiter), _SAMPLE_ROWS) if row]
    usual = max(widths, key=widths.count, default=0)
    return (widths.count(usual) if usual > 1 else 0), usual


def _rows(source: str, delimiter: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(source), delimiter=delimiter)
    except csv.Error as error:
        raise Unreadable(f"expected a table: {error}") from None


def _of_rows(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    names = [" ".join(name.split()) for name in next(rows, ())]
    second = list(islice(rows, 1))
    are_names = len({name for name in names if not _NUMBER.fullmatch(name)}) == len(names)
    yield " | ".join(names).strip()
    if not second or not are_names:
        names = []
    for row in chain(second, rows):
        values = [" ".join(value.split()) for value in row]
        if names:
            named = zip_longest(names, values, fillvalue="")
            values = [f"{name}: {value}" if name else value for name, value in named if value]
        yield " | ".join(values).strip()
