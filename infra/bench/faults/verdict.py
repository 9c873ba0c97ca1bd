"""Runs `checker.py` as a process of its own, and turns its findings into bars."""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.bench.results import Bar, at_most
from infra.stack.configuration import Settings
from schemas.codec import AVRO_DIR
from schemas.errors import NotReady
from schemas.sections import build
from schemas.settings import LogSettings
from streams.gateway.http.entry import Keys
from workers.llm.sim.settings import SimSettings
from workers.llm.sim.vocabulary import load_vocabulary

CHECKER = Path(__file__).with_name("checker.py")
WORKER_STALL_S, OTHER_STALL_S = 6.0, 12.0  # at the 99th percentile
_NOUGHT = {  # findings that must be zero whichever processes die
    "outcomes.without": "accepted requests without an outcome",
    "outcomes.double": "accepted requests with several outcomes",
    "outcomes.of_no_request": "outcomes of no request",
    "outcomes.lost": "accepted requests that failed or expired",
    "outcomes.of_other_lengths": "outcomes of other lengths",
    "clients.gaps": "answers with a gap",
    "clients.repeats": "answers with a repeat",
    "clients.wrong": "answers with wrong tokens",
    "clients.not_on_the_log": "answers that are not on the log",
    "clients.not_answered": "clients that were not answered",
    "frames.gaps": "gaps on the log",
    "frames.wrong": "wrong rows on the log",
    "frames.beyond_the_end": "rows beyond an end on the log",
    "orders": "orders that contradict a request",
}
_STALLS = {"worker": WORKER_STALL_S, "router": OTHER_STALL_S, "gateway": OTHER_STALL_S}


def history_task(settings: Settings, history: Path, key: str = "") -> dict[str, Any]:
    """Return the checker's task for a history, for the tenant of `key` if given."""
    engine = build("sim", SimSettings, settings.engines["sim"])
    words = load_vocabulary(settings.model.path)
    vocabulary = zip(words.ids[: words.size], words.texts, strict=False)
    return {
        **_log_of(settings.log),
        "history": str(history),
        "tenant": Keys([key]).tenant({b"authorization": b"Bearer " + key.encode()}) if key else "",
        "engine": {
            "block_size": engine.block_size,
            "vocabulary": [(token_id, text) for (token_id,), text in vocabulary],
        },
    }


def pairs_task(
    log: LogSettings,
    *,
    notes: Path,
    http: Path,
    ordered: bool = True,
    batches: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return the checker's task for the pairs of topics of a bridge."""
    pairs = [
        {"prompts": "prompts", "answers": "answers", "notes": str(notes), "ordered": ordered},
        {"prompts": "batch.prompts", "answers": "batch.answers", "ordered": False},
    ]
    for pair in pairs:
        pair |= {side: f"{log.topic_prefix}{pair[side]}" for side in ("prompts", "answers")}
    of_log = {**_log_of(log), "group": f"{log.topic_prefix}bridge"}
    return {**of_log, "pairs": pairs, "http": str(http), "batches": list(batches)}


def _log_of(log: LogSettings) -> dict[str, str]:
    return {"bootstrap": log.bootstrap, "prefix": log.topic_prefix, "schemas": str(AVRO_DIR)}


async def run_checker(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run the checker on this task, which stays in the folder; raises NotReady."""
    file = folder / "task.json"
    file.write_text(json.dumps(task))
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(CHECKER), str(file), stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await child.communicate()
    if child.returncode:
        raise NotReady(f"{CHECKER.name} ended with {child.returncode}; it says why above")
    findings: dict[str, Any] = json.loads(stdout)
    return findings


def nought(
    findings: Mapping[str, Any], labels: Mapping[str, str] = _NOUGHT, prefix: str = ""
) -> list[Bar]:
    """Return bars for findings that must be zero; those that were not checked are None."""
    counts = {label: count_of(findings, path) for path, label in labels.items()}
    return [
        at_most(prefix + label, count, 0) for label, count in counts.items() if count is not None
    ]


def count_of(findings: Mapping[str, Any], path: str) -> int | None:
    """Return the count of one finding; `path` has its names, joined by dots."""
    finding: Any = findings
    for name in path.split("."):
        finding = finding[name]
    count: int | None = finding["count"] if isinstance(finding, Mapping) else finding
    return count


def bars(findings: Mapping[str, Any]) -> Iterator[Bar]:
    """Yield the bars of a history: zeros, and how long answers stall."""
    yield from nought(findings)
    for kind, limit_s in _STALLS.items():
        p99_s = findings["stalls"].get(kind, {}).get("p99_s", 0.0)
        yield at_most(f"stalls by a {kind}, p99", p99_s, limit_s, "s")


def examples(findings: Mapping[str, Any]) -> list[str]:
    """Return examples of violations as lines of text."""
    lines = []
    for path, label in _NOUGHT.items():
        part, _, name = path.partition(".")
        summary = findings[part][name] if name else findings[part]
        lines += [f"{label}: {example}" for example in summary["some"]]
    return lines
