"""What files say, in a process of its own: `python -m streams.gateway.indexing.parsing`.

Reads one question per line, the place of a file and its name, and writes one answer per line, as
JSON, until its input ends. A hostile file may cost this process its life: `reading.py` and
`trivium ingest` ask, and end it when an answer takes too long.
"""

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streams.parsing.kinds import kind_of, parse
from streams.parsing.parsed import INVALID, UNSUPPORTED, Unreadable

MEMORY_BYTES_MAX = 2 << 30
TEXTS_MAX = 50_000  # of a file, as a batch has lines


def documents(path: str, name: str) -> dict[str, Any]:
    """The documents of a file, as `Parsed` has them, or why there are none."""
    try:
        kind = kind_of(name)
    except Unreadable as error:
        return {"code": UNSUPPORTED, "wrong": str(error)}
    try:
        found = parse(kind, Path(path).read_bytes())
    except Unreadable as error:
        return {"code": INVALID, "wrong": str(error)}
    if len(found) > TEXTS_MAX:
        wrong = f"expected at most {TEXTS_MAX} documents in a file, found {len(found)}; divide it"
        return {"code": INVALID, "wrong": wrong}
    if not any(each.text.strip() or each.wrong for each in found):
        return {"code": INVALID, "wrong": "empty: expected a text with words"}
    return {"documents": [asdict(each) for each in found]}


def main() -> None:
    """Answer until nobody asks any more."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    _say("ready")
    for line in sys.stdin:
        _, arguments = json.loads(line)
        _say(documents(*arguments))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
