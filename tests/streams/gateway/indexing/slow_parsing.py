"""Stands in for `parsing.py`: what begins with `slow` is never answered."""

import json
import signal
import sys
from pathlib import Path


def main() -> None:
    print('"ready"', flush=True)
    slow = 0
    for line in sys.stdin:
        _, (path, _) = json.loads(line)
        text = Path(path).read_text()
        if text.startswith("slow"):
            slow += 1
            signal.pause()
        print(json.dumps({"texts": [["", f"{text}, after {slow} slow ones"]]}), flush=True)


if __name__ == "__main__":
    main()
