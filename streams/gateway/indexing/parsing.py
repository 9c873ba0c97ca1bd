"""What uploaded files say, in a process of its own: `python -m streams.gateway.indexing.parsing`.

Reads one question per line, the place of a file and its name, and writes one answer per line, as
JSON, until its input ends. A hostile file may cost this process its life: `reading.py` asks, and
ends it when an answer takes too long.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from streams.parsing.kinds import kind_of, parse
from streams.parsing.parsed import INVALID, UNSUPPORTED, Unreadable

MEMORY_BYTES_MAX = 2 << 30
CHARS_MAX = 16 << 20  # of all texts of a file
TEXTS_MAX = 50_000  # likewise, as a batch has lines


def texts(path: str, name: str) -> dict[str, Any]:
    """Titles and texts of a file, or why there are none."""
    try:
        kind = kind_of(name)
    except Unreadable as error:
        return {"code": UNSUPPORTED, "wrong": str(error)}
    try:
        found = parse(kind, Path(path).read_bytes())
    except (Unreadable, RecursionError) as error:
        return {"code": INVALID, "wrong": str(error)}
    for each in found:
        if each.wrong:
            return {"code": INVALID, "wrong": f"{each.place}: {each.wrong}"}
    if (chars := sum(len(each.text) for each in found)) > CHARS_MAX:
        wrong = f"expected at most {CHARS_MAX} characters of text, found {chars}; divide it"
        return {"code": INVALID, "wrong": wrong}
    if len(found) > TEXTS_MAX:
        wrong = f"expected at most {TEXTS_MAX} documents in a file, found {len(found)}; divide it"
        return {"code": INVALID, "wrong": wrong}
    said = [[each.title, each.text] for each in found if each.text.strip()]
    if not said:
        return {"code": INVALID, "wrong": "empty: expected a text with words"}
    return {"texts": said}


def main() -> None:
    """Answer until nobody asks any more."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    _say("ready")
    for line in sys.stdin:
        _, arguments = json.loads(line)
        _say(texts(*arguments))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
