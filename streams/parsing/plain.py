"""Plain text and JSON lines."""

import codecs
import json
from collections.abc import Iterator
from typing import Any

from schemas.rules.numbers import float_of
from streams.parsing.parsed import Parsed, Unreadable

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def decoded(data: bytes) -> str:
    """UTF-8, or what a mark at the beginning says; raises Unreadable."""
    named = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(named)
    except UnicodeDecodeError as error:
        raise Unreadable(f"expected text in UTF-8, found other bytes at {error.start}") from None
    if "\0" in text:
        raise Unreadable("expected text, found zero bytes: it is some other kind of file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def plain_text(data: bytes) -> Parsed:
    """As it is."""
    return Parsed(decoded(data))


def json_lines(data: bytes) -> Iterator[Parsed]:
    """One document per line: `{"id": "a", "text": "…", "title": "…", "metadata": {…}}`."""
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
        raise Unreadable("expected a JSON object with id and text")
    if found.get("vector"):
        raise Unreadable("found a vector; `trivium documents load` takes documents with vectors")
    name, text, metadata = found.get("id"), found.get("text"), found.get("metadata") or {}
    if not isinstance(name, str | int) or isinstance(name, bool) or str(name) == "":
        raise Unreadable("expected an id, a string or a whole number")
    if not isinstance(text, str):
        raise Unreadable(f"document {name!r:.80}: expected a text")
    title, tenant = found.get("title") or "", found.get("tenant") or ""
    fits = isinstance(metadata, dict) and isinstance(title, str) and isinstance(tenant, str)
    if not fits:
        raise Unreadable(
            f"document {name!r:.80}: expected strings as title and tenant, an object as metadata"
        )
    try:
        f"{name}{text}{title}{tenant}".encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"document {name!r:.80}: expected characters: {error.reason}") from None
    return Parsed(text, title, str(name), tenant, metadata, place)
