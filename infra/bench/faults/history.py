"""The history of a run: the answers of clients and the injected faults, as lines of JSON.

`infra/bench/faults/checker.py` checks the answers; `stalls` finds how long each fault held them up.

The field `what` has the kind of a line. `answer`: its request id if known, its status, its tokens
and text, and the time of each part. `blow`: the process and the kind of fault. `back`: the broker
answers again. Times are wall ms.
"""

import json
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infra.bench.faults.http_clients import ClientAnswer
from infra.bench.faults.kill_schedule import InjectedFault

STALL_MS = 500  # shorter pauses need no fault to explain them
# A stall may begin this long after the fault that explains it; the first kind that matches counts.
LATE_MS = {"router": 12_000, "gateway": 12_000, "worker": 6_000, "retrieval": 6_000}
BROKER_LATE_MS = 15_000  # from the broker's recovery; the broker takes precedence over all kinds
KINDS = {"prefill": "worker", "decode": "worker", "embedding": "retrieval"}
Event = dict[str, Any]


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


def stalls_in(path: Path) -> dict[str, Any]:
    """Return the stalls of the answers in a history."""
    events: list[Event] = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [event for event in events if event["what"] == "answer"]
    return stalls(answers, [event for event in events if event["what"] != "answer"])


def stalls(answers: Iterable[Event], blows: Iterable[Event]) -> dict[str, Any]:
    """Return pauses in answers, from the call to the last event, by cause: the broker if it was
    down; else the first kind in `LATE_MS` with a fault in the pause or shortly before. In s."""
    dealt = sorted((event["at_ms"], kind_of(event["name"])) for event in blows if "how" in event)
    backs = sorted(event["at_ms"] for event in blows if "how" not in event)
    away = [(at, backs[bisect_left(backs, at) :]) for at, kind in dealt if kind == "broker"]
    pauses_s: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        moments = [answer["asked_ms"], *answer["at_ms"], answer["ended_ms"]]
        for begin, end in zip(moments, moments[1:], strict=False):
            if end - begin < STALL_MS:
                continue
            recent_kinds = {kind for at, kind in dealt if begin - LATE_MS.get(kind, 0) <= at < end}
            cause = next((kind for kind in LATE_MS if kind in recent_kinds), "nothing")
            if any(
                at < end and begin < min(back, default=end) + BROKER_LATE_MS for at, back in away
            ):
                cause = "broker"
            pauses_s[cause].append((end - begin) / 1000)
    shares = {"p50_s": 50, "p99_s": 99, "max_s": 100}
    return {
        cause: {"stalls": len(s), **{n: s[-(-(len(s) - 1) * p // 100)] for n, p in shares.items()}}
        for cause, s in ((cause, sorted(some)) for cause, some in sorted(pauses_s.items()))
    }


def kind_of(name: str) -> str:
    """Return the kind of the process with this name."""
    kind = name.partition("-")[0]
    return KINDS.get(kind, kind)
