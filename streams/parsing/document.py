"""What a file holds: documents, and what is wrong with the rest of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_CHARS_MAX = 16 << 20  # of all texts of a file
UNSUPPORTED, INVALID = "unsupported_file", "invalid_file"  # as OpenAI names what is wrong


class Unreadable(Exception):
    """A file, or a line of one, that gives no document; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A document's text; `document_id` where it has one of its own, as a line of JSON has."""

    text: str
    title: str = ""
    document_id: str = ""
    tenant: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""  # within its file, as "line 3"
    wrong: str = ""  # why there is no document, if there is none
