"""Stands in for `parsing.py`: what begins with `slow` is never answered."""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from streams.gateway.indexing.parsing import say
from streams.parsing.parsed import Parsed


def main() -> None:
    print('"ready"', flush=True)
    slow = 0
    for line in sys.stdin:
        _, (path, _) = json.loads(line)
        text = Path(path).read_text()
        if text.startswith("slow"):
            slow += 1
            signal.pause()
        read = Parsed(f"{text}, after {slow} slow ones")
        say([asdict(read)])


if __name__ == "__main__":
    main()
