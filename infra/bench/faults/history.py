"""Writes the answers of clients and the injected faults as lines of JSON that `checker.py` reads.

The field `what` has the kind of a line. `answer`: its request id if known, its status, its tokens
and text, and the time of each part. `blow`: the process and the kind of fault. `back`: the broker
answers again. Times are wall ms.
"""

import json
import time
from pathlib import Path
from typing import Any

from infra.bench.faults.http_clients import ClientAnswer
from infra.bench.faults.kill_schedule import InjectedFault


class FaultHistory:
    """Writes answers, faults and recoveries as lines of one new file."""

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, 0
        self._file = path.open("w")
        self._wall_s = time.time() - time.monotonic()

    def record_answer(self, answer: ClientAnswer) -> None:
        """Write down how an answer ended, and what it contains."""
        self._number += 1
        self._write(
            {
                "what": "answer",
                "number": self._number,
                "request_id": answer.request_id,
                "ended": answer.status,
                "detail": answer.detail,
                "resumes": answer.resumes,
                "token_ids": answer.token_ids,
                "text": answer.text,
                "asked_ms": self._ms(answer.asked_s),
                "at_ms": [self._ms(at_s) for at_s in answer.times_s],
                "ended_ms": self._ms(time.monotonic()),
            }
        )

    def record_fault(self, fault: InjectedFault) -> None:
        """Write down that this fault is injected now."""
        at_ms = self._ms(time.monotonic())
        self._write({"what": "blow", "name": fault.name, "how": fault.how, "at_ms": at_ms})

    def record_recovery(self, name: str) -> None:
        """Write down that this process answers again."""
        self._write({"what": "back", "name": name, "at_ms": self._ms(time.monotonic())})

    def close(self) -> None:
        """Close the file when the run has ended."""
        self._file.close()

    def _ms(self, at_s: float) -> int:
        return round((at_s + self._wall_s) * 1000)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
