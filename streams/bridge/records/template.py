"""A text with placeholders for fields of a record: `{name}`, `{customer.city}`, `{lines.0}`.

`{note?}` is empty if the field is missing or null; without the mark that is an error. `{{` and `}}`
are braces. Inserted text is never read as a template again.
"""

import re
from collections.abc import Mapping
from typing import Any

from schemas.errors import ConfigError, InvalidRequest

_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_PATH = re.compile(r"[^{}\s.?]+(\.[^{}\s.?]+)*\??")


class Template:
    """A parsed template; raises ConfigError if its text is invalid."""

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str]] = []  # literal text, and the path that follows it
        literal, at = "", 0
        for match in _PLACE.finditer(text):
            literal += text[at : match.start()]
            at, place = match.end(), match[0]
            if place in ("{{", "}}"):
                literal += place[0]
            elif match[1] is not None and _PATH.fullmatch(match[1]):
                self._parts.append((literal, match[1]))
                literal = ""
            else:
                raise ConfigError(
                    f"expected the name of a field in braces, as {{city}} or {{a.b}}, or two "
                    f"braces for one, found {place[:40]!r} at character {match.start()}"
                )
        self._rest = literal + text[at:]

    @property
    def fields(self) -> list[str]:
        """Return the field paths that the template uses."""
        return [path.removesuffix("?") for _, path in self._parts]

    def fill(self, value: Mapping[str, Any]) -> str:
        """Return the text for a record; raises InvalidRequest for a field that it lacks."""
        filled = "".join(literal + _text(path, value) for literal, path in self._parts)
        return filled + self._rest


def look_up(path: str, value: Mapping[str, Any]) -> Any:
    """Return a field by its path; None if it is missing."""
    at: Any = value
    for name in path.split("."):
        if isinstance(at, Mapping):
            at = at.get(name)
        elif isinstance(at, list | tuple) and name.isdecimal():
            at = at[int(name)] if int(name) < len(at) else None
        else:
            return None
    return at


def _text(path: str, value: Mapping[str, Any]) -> str:
    name = path.removesuffix("?")
    field = look_up(name, value)
    if field is None:
        if name != path:
            return ""
        raise InvalidRequest(
            f"template: expected a field {name}, found none, or null; the record has "
            f"{', '.join(map(str, value))[:200] or 'no fields'}",
            name,
        )
    if isinstance(field, str):
        return field
    from streams.bridge.records.exact_json import json_text  # settings need no JSON

    return json_text(field)
