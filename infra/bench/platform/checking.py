"""Runs `checker.py` as a separate process until every request has its usage record."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.codec import AVRO_DIR
from schemas.errors import NotReady
from schemas.settings import LogSettings

_CHECKER = Path(__file__).with_name("checker.py")
_TRIES, _PAUSE_S = 12, 5.0  # requests of a killed gateway end after 30 s


def make_task(
    log: LogSettings,
    *,
    notes: Path,
    http: Path,
    ordered: bool = True,
    batches: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return the task for the checker as JSON data."""
    prefix = log.topic_prefix
    return {
        "bootstrap": log.bootstrap,
        "prefix": prefix,
        "schemas": str(AVRO_DIR),
        "group": f"{prefix}bridge",
        "pairs": [
            {
                "prompts": f"{prefix}prompts",
                "answers": f"{prefix}answers",
                "notes": str(notes),
                "ordered": ordered,
            },
            {
                "prompts": f"{prefix}batch.prompts",
                "answers": f"{prefix}batch.answers",
                "ordered": False,
            },
        ],
        "http": str(http),
        "batches": list(batches),
    }


async def run_checker(checker_task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run the checker, up to `_TRIES` times until every request has usage; raises NotReady."""
    file = folder / "task.json"
    file.write_text(json.dumps(checker_task, indent=1))
    for _ in range(_TRIES):
        findings = await _run(file)
        if not findings["usage"]["requests_without_record"]["count"]:
            break
        await asyncio.sleep(_PAUSE_S)
    return findings


async def _run(file: Path) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(_CHECKER), str(file), stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await child.communicate()
    if child.returncode:
        raise NotReady(f"{_CHECKER.name} ended with {child.returncode}; it says why above")
    findings: dict[str, Any] = json.loads(stdout)
    return findings
