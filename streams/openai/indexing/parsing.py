"""Extracts the texts of files in a child process: `python -m streams.openai.indexing.parsing`.

Reads one question per line, with the path and the name of a file, and writes a list in lines of
JSON for each (`check_process.py`), until its input ends. A hostile file may crash this process.
`reading.py` and `trivium ingest` start it, and end it when an answer takes too long.
"""

import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from streams.parsing.document import INVALID, UNSUPPORTED, Unreadable
from streams.parsing.kinds import kind_of, parse

MEMORY_BYTES_MAX = 2 << 30
TEXTS_MAX = 50_000  # of a file; the limit of a batch's lines
LINE_CHARS = 256_000  # of a text in one line


def documents(path: str, name: str) -> Iterator[dict[str, Any] | str]:
    """Yield the documents of a file as fields of `ParsedDocument`, each followed by strings that
    continue its text; or a code, and why there are none."""
    try:
        kind = kind_of(name)
    except Unreadable as error:
        yield {"code": UNSUPPORTED, "wrong": str(error)}
        return
    try:
        parsed_documents = parse(kind, Path(path).read_bytes())
        if len(parsed_documents) > TEXTS_MAX:
            raise Unreadable(
                f"expected at most {TEXTS_MAX} documents in a file, found "
                f"{len(parsed_documents)}; divide it"
            )
        if not any(document.text.strip() or document.wrong for document in parsed_documents):
            raise Unreadable("empty: expected a text with words")
    except Unreadable as error:
        yield {"code": INVALID, "wrong": str(error)}
        return
    for document in parsed_documents:
        yield asdict(replace(document, text=document.text[:LINE_CHARS]))
        for first in range(LINE_CHARS, len(document.text), LINE_CHARS):
            yield document.text[first : first + LINE_CHARS]


def main() -> None:
    """Answer questions until the input ends."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    sys.stdout.write(json.dumps("ready") + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        _, arguments = json.loads(line)
        write_list(documents(*arguments))


def write_list(items: Iterable[Any]) -> None:
    """Write a list, with one line of JSON per item."""
    sys.stdout.write("[\n")
    for item in items:
        sys.stdout.write(json.dumps(item) + "\n")
    sys.stdout.write("]\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
