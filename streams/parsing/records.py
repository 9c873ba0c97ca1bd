"""Files of records to text: JSON, JSON lines, and tables with commas, tabs or semicolons."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from schemas.rules.numbers import float_of
from streams.parsing.charset import decode_text
from streams.parsing.document import TEXT_CHARS_MAX, ParsedDocument, Unreadable

_CELL_CHARS_MAX = 1 << 20
_SAMPLE_CHARS, _SAMPLE_ROWS = 65_536, 20  # to detect the delimiter
_DELIMITERS = ",;\t|"
_NUMBER = re.compile(r"[\s\d.,:/%€$£+-]*")
csv.field_size_limit(_CELL_CHARS_MAX)


def json_lines(data: bytes) -> Iterator[ParsedDocument]:
    """Yield one document per line: `{"id": "a", "text": "…", "title": "…", "metadata": {…}}`.

    A line without an id is identified by its number, in `place`. A line without a usable document
    yields the reason in `wrong`.
    """
    for number, line in enumerate(decode_text(data).split("\n"), 1):
        if line.strip():
            place = f"line {number}"
            try:
                yield _of_line(json.loads(line, parse_float=float_of), place)
            except (ValueError, RecursionError) as error:
                yield ParsedDocument("", place=place, wrong=f"expected a JSON object: {error}")
            except Unreadable as error:
                yield ParsedDocument("", place=place, wrong=str(error))


def _of_line(fields: Any, place: str) -> ParsedDocument:
    if not isinstance(fields, dict):
        raise Unreadable("expected a JSON object with a text")
    if fields.get("vector"):
        raise Unreadable("found a vector; `trivium ingest --vectors` takes documents with vectors")
    name, text, metadata = fields.get("id"), fields.get("text"), fields.get("metadata") or {}
    if not isinstance(name, str | int | None) or isinstance(name, bool) or name == "":
        raise Unreadable("expected an id, a string or a whole number")
    label = "" if name is None else f"document {name!r:.80}: "
    if not isinstance(text, str):
        raise Unreadable(f"{label}expected a text")
    title, tenant = fields.get("title") or "", fields.get("tenant") or ""
    fits = isinstance(metadata, dict) and isinstance(title, str) and isinstance(tenant, str)
    if not fits:
        raise Unreadable(f"{label}expected strings as title and tenant, an object as metadata")
    try:
        f"{name}{text}{title}{tenant}".encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"{label}expected characters: {error.reason}") from None
    document_id = "" if name is None else str(name)
    return ParsedDocument(text, title, document_id, tenant, metadata, place)


def json_text(data: bytes) -> ParsedDocument:
    """Return a line per value, after its path: `price.amount: 12.50`; numbers keep their digits."""
    source = decode_text(data)
    try:
        value = json.loads(source, parse_float=str, parse_int=str, parse_constant=str)
        text = _join_lines(_lines(value, ""))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected JSON: {error}") from None
    return ParsedDocument(text.encode(errors="replace").decode())


def _join_lines(lines: Iterable[str]) -> str:
    """Join lines; raises Unreadable if the text is too long. Paths and column names are repeated,
    so a small file may become a long text."""
    parts, chars = list[str](), 0
    for line in lines:
        parts.append(line)
        chars += len(line) + 1
        if chars > TEXT_CHARS_MAX:
            raise Unreadable(f"expected at most {TEXT_CHARS_MAX} characters of text; divide it")
    return "\n".join(parts)


def _lines(value: Any, path: str) -> Iterator[str]:
    """Yield the lines of a value. A blank line separates the entries of an outermost list, which
    are usually records."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        if all(not isinstance(inner, dict | list) for inner in value):
            text = ", ".join(_spell(inner) for inner in value)
            yield from _line(text, path)
            return
        for number, inner in enumerate(value):
            if not path and number:
                yield ""
            yield from _lines(inner, f"{path}[{number}]" if path else "")
    else:
        yield from _line(_spell(value), path)


def _line(text: str, path: str) -> Iterator[str]:
    if text.strip():
        yield f"{path}: {text}" if path else text


def _spell(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def table(data: bytes) -> ParsedDocument:
    """Return a line per row; if the first row has the names of columns, with these."""
    source = decode_text(data)
    delimiter = max(_DELIMITERS, key=lambda sign: _regularity(source[:_SAMPLE_CHARS], sign))
    rows = (row for row in _rows(source, delimiter) if any(map(str.strip, row)))
    return ParsedDocument(_join_lines(_of_rows(rows)))


def _regularity(sample: str, delimiter: str) -> tuple[int, int]:
    """Return how many of the first rows have the most common number of values, and that number."""
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
            pairs = zip_longest(names, values, fillvalue="")
            values = [f"{name}: {value}" if name else value for name, value in pairs if value]
        yield " | ".join(values).strip()
