"""The result of parsing a file: its documents, and the errors of the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_CHARS_MAX = 16 << 20  # of all texts of a file together
UNSUPPORTED, INVALID = "unsupported_file", "invalid_file"  # OpenAI's codes


class Unreadable(Exception):
    """A file, or a line of one, has no usable document; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A document of a file; `document_id` is set if the file names one, as a line of JSON may."""

    text: str
    title: str = ""
    document_id: str = ""
    tenant: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""  # in its file, such as "line 3"
    wrong: str = ""  # why there is no document, or empty
