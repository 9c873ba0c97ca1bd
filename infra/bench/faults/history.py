"""What clients saw and what was done to processes, as lines of JSON that `checker.py` reads.

A line says `what` it is. `answer`: its request as far as it is known, how it ended, its tokens and
text, and when each part came. `blow`: which process was hurt, and how. `back`: the broker answers
again. Times are wall ms.
"""

import json
import time
from pathlib import Path
from typing import Any

from infra.bench.faults.http_clients import Seen
from infra.bench.faults.kill_schedule import Blow


class History:
    """One file, begun anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, 0
        self._file = path.open("w")
        self._wall_s = time.time() - time.monotonic()

    def answer(self, seen: Seen) -> None:
        """One ended, in whichever way."""
        self._number += 1
        self._write(
            {
                "what": "answer",
                "number": self._number,
                "request_id": seen.request_id,
                "ended": seen.ended,
                "detail": seen.detail,
                "resumes": seen.resumes,
                "token_ids": seen.token_ids,
                "text": seen.text,
                "asked_ms": self._ms(seen.asked_s),
                "at_ms": [self._ms(at_s) for at_s in seen.times_s],
                "ended_ms": self._ms(time.monotonic()),
            }
        )

    def blow(self, blow: Blow) -> None:
        """One falls now."""
        at_ms = self._ms(time.monotonic())
        self._write({"what": "blow", "name": blow.name, "how": blow.how, "at_ms": at_ms})

    def back(self, name: str) -> None:
        """It answers again."""
        self._write({"what": "back", "name": name, "at_ms": self._ms(time.monotonic())})

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()

    def _ms(self, at_s: float) -> int:
        return round((at_s + self._wall_s) * 1000)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
