"""Formats an answer's citations as lines for a terminal."""

from collections.abc import Iterator
from typing import Any

from infra.terminal.printable import printable

_TEXT_CHARS = 80


def citation_lines(retrieval: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each passage in `trivium.retrieval` of an answer, or for its error."""
    for number, citation in enumerate(retrieval.get("citations", ()), start=1):
        place = f"at token {citation['before_token']}" if citation.get("probe") else ""
        origin = ", ".join(filter(None, (citation["source"], f"{citation['score']:.2f}", place)))
        quote = " ".join(citation["text"].split())
        dots = "" if len(quote) <= _TEXT_CHARS else " ..."
        title = citation["title"] or citation["document_id"]
        yield printable(f"[{number}] {title} ({origin}): {quote[:_TEXT_CHARS]}{dots}")
    if error := retrieval.get("error"):
        yield printable(f"answered without documents: {error['message']}")
