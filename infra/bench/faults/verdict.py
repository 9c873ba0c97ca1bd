"""Runs `checker.py` as a separate process, and turns its findings into bars."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.bench.results import Bar, at_most
from infra.stack.configuration import Settings
from schemas.codec import AVRO_DIR
from schemas.errors import NotReady
from schemas.sections import build
from streams.gateway.http.entry import Keys
from workers.llm.sim.settings import SimSettings
from workers.llm.sim.vocabulary import load_vocabulary

CHECKER = Path(__file__).with_name("checker.py")
WORKER_STALL_S, OTHER_STALL_S = 6.0, 12.0  # at the 99th percentile
_NOUGHT = {  # label to section and name of a finding
    "accepted requests without an outcome": ("outcomes", "without"),
    "accepted requests with several outcomes": ("outcomes", "double"),
    "outcomes of no request": ("outcomes", "of_no_request"),
    "accepted requests that failed or expired": ("outcomes", "lost"),
    "outcomes of other lengths": ("outcomes", "of_other_lengths"),
    "answers with a gap": ("clients", "gaps"),
    "answers with a repeat": ("clients", "repeats"),
    "answers with wrong tokens": ("clients", "wrong"),
    "answers that are not on the log": ("clients", "not_on_the_log"),
    "clients that were not answered": ("clients", "not_answered"),
    "gaps on the log": ("frames", "gaps"),
    "wrong rows on the log": ("frames", "wrong"),
    "rows beyond an end on the log": ("frames", "beyond_the_end"),
}
_STALLS = {"worker": WORKER_STALL_S, "router": OTHER_STALL_S, "gateway": OTHER_STALL_S}


def write_task(settings: Settings, history: Path, key: str = "") -> Path:
    """Write the checker's task beside the history, for the tenant of `key` if given."""
    engine = build("sim", SimSettings, settings.engines["sim"])
    words = load_vocabulary(settings.model.path)
    vocabulary = zip(words.ids[: words.size], words.texts, strict=False)
    task = {
        "bootstrap": settings.log.bootstrap,
        "prefix": settings.log.topic_prefix,
        "schemas": str(AVRO_DIR),
        "history": str(history),
        "tenant": Keys([key]).tenant({b"authorization": b"Bearer " + key.encode()}) if key else "",
        "engine": {
            "block_size": engine.block_size,
            "vocabulary": [(token_id, text) for (token_id,), text in vocabulary],
        },
    }
    file = history.with_name("task.json")
    file.write_text(json.dumps(task))
    return file


async def run_checker(task: Path) -> dict[str, Any]:
    """Run the checker on this task and return its findings; raises NotReady."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(CHECKER), str(task), stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await child.communicate()
    if child.returncode:
        raise NotReady(f"{CHECKER.name} ended with {child.returncode}; it says why above")
    findings: dict[str, Any] = json.loads(stdout)
    return findings


def zero_bars(findings: Mapping[str, Any]) -> list[Bar]:
    """Return bars for counts that must be zero whichever processes die."""
    counted = {name: findings[part][what]["count"] for name, (part, what) in _NOUGHT.items()}
    counted["orders that contradict a request"] = findings["orders"]["count"]
    return [at_most(name, count, 0, "") for name, count in counted.items()]


def bars(findings: Mapping[str, Any]) -> list[Bar]:
    """Return the zero bars, and bars on how long answers stall."""
    judged = zero_bars(findings)
    for kind, limit_s in _STALLS.items():
        p99_s = findings["stalls"].get(kind, {}).get("p99_s", 0.0)
        judged.append(at_most(f"stalls by a {kind}, p99", p99_s, limit_s, "s"))
    return judged


def examples(findings: Mapping[str, Any]) -> list[str]:
    """Return examples of violations as lines of text."""
    places = {**_NOUGHT, "orders": ("orders", "")}
    lines = []
    for name, (part, what) in places.items():
        counted = findings[part][what] if what else findings[part]
        lines += [f"{name}: {example}" for example in counted["some"]]
    return lines
