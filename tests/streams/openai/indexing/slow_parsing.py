"""Stands in for `parsing.py`: what begins with `slow` is never answered."""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from streams.openai.indexing.parsing import write_list
from streams.parsing.document import ParsedDocument


def main() -> None:
    print('"ready"', flush=True)
    slow = 0
    for line in sys.stdin:
        _, (path, _) = json.loads(line)
        text = Path(path).read_text()
        if text.startswith("slow"):
            slow += 1
            signal.pause()
        read = ParsedDocument(f"{text}, after {slow} slow ones")
        write_list([asdict(read)])


if __name__ == "__main__":
    main()
