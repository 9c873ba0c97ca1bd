"""A program that waits until it is asked to end."""

import signal
import sys
from typing import Any


def _handle_sigterm(*_: Any) -> None:
    sys.exit("asked to end")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _handle_sigterm)
    print("up", flush=True)
    while True:
        signal.pause()
