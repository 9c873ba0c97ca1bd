"""What an answer cites, as lines for a terminal."""

from collections.abc import Iterator
from typing import Any

from infra.terminal.printable import printable

_TEXT_CHARS = 80


def citation_lines(retrieval: dict[str, Any]) -> Iterator[str]:
    """`trivium.retrieval` of an answer: a line for each passage, or why there is none."""
    for number, each in enumerate(retrieval.get("citations", ()), start=1):
        place = f"at token {each['before_token']}" if each.get("probe") else ""
        named = ", ".join(filter(None, (each["source"], f"{each['score']:.2f}", place)))
        said = " ".join(each["text"].split())
        dots = "" if len(said) <= _TEXT_CHARS else " ..."
        title = each["title"] or each["document_id"]
        yield printable(f"[{number}] {title} ({named}): {said[:_TEXT_CHARS]}{dots}")
    if error := retrieval.get("error"):
        yield printable(f"answered without documents: {error['message']}")
