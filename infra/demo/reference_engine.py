"""Asks one engine alone the questions that a deployment answered, and compares token by token.

Runs as a process of its own (`python -m infra.demo.reference_engine SETTINGS QUESTIONS`), because
vLLM re-imports the main module; prints the verdicts as JSON. The engine is a replica: no connector,
no peer, the plainest way to the right answer.
"""

import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.engine_source import engine_source
from infra.story.story import Story
from schemas.errors import EngineFailed
from schemas.log.clock import wall_ms
from schemas.records import Role, Sampling, Structured, WorkPhase
from schemas.rules.tokens import unpack_tokens
from workers.llm.engine import Engine, Job

ANSWER_TIMEOUT_MS = 120_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one answer is what the engine alone gives."""

    request_id: str
    tokens: int
    equal: bool
    first_difference: int  # token number, -1 for none


def compare(
    stories: Sequence[Story], settings: Settings, *, timeout_s: float = 300
) -> list[Verdict]:
    """Run the reference process over these stories; raises EngineFailed with its last words."""
    questions = [
        {
            "request_id": story.request.request_id,
            "prompt": unpack_tokens(story.request.prompt_tokens),
            "sampling": dataclasses.asdict(story.request.sampling),
            "expected": story.token_ids,
        }
        for story in stories
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings_file, questions_file = Path(folder) / "settings.toml", Path(folder) / "questions"
        settings_file.write_text(configuration.dump(settings))
        questions_file.write_text(json.dumps(questions))
        files = [str(settings_file), str(questions_file)]
        command = [sys.executable, "-m", "infra.demo.reference_engine", *files]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise EngineFailed(f"the reference engine ended early: {done.stderr[-2_000:]}")
    return [Verdict(**verdict) for verdict in json.loads(done.stdout.splitlines()[-1])]


async def _answer(engine: Engine, question: Mapping[str, Any]) -> list[int]:
    sampling = dict(question["sampling"])
    if sampling["structured"]:
        sampling["structured"] = Structured(**sampling["structured"])
    job = Job(
        request_id=question["request_id"],
        phase=WorkPhase.DECODE,
        prompt_tokens=question["prompt"],
        sampling=Sampling(**sampling),
        deadline_ms=wall_ms() + ANSWER_TIMEOUT_MS,
    )
    engine.add(job)
    tokens: list[int] = []
    while True:
        for output in await engine.outputs():
            tokens += output.token_ids
            if output.error is not None:
                raise EngineFailed(f"{output.request_id}: {output.error.message}")
            if output.finish_reason:
                return tokens


def _verdict(question: Mapping[str, Any], found: list[int]) -> Verdict:
    expected = question["expected"]
    same = len(_common_prefix(expected, found))
    equal = expected == found
    return Verdict(
        request_id=question["request_id"],
        tokens=len(found),
        equal=equal,
        first_difference=-1 if equal else same,
    )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> list[int]:
    same = []
    for mine, yours in zip(left, right, strict=False):
        if mine != yours:
            break
        same.append(mine)
    return same


async def _main(settings: Settings, questions: list[dict[str, Any]]) -> None:
    engine = await engine_source(settings, "reference", [Role.REPLICA])(1)
    try:
        verdicts = [_verdict(q, await _answer(engine, q)) for q in questions]
    finally:
        await engine.close()
    sys.stdout.write(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts]) + "\n")


if __name__ == "__main__":
    asyncio.run(
        _main(
            configuration.load(Path(sys.argv[1]), environ={}),
            json.loads(Path(sys.argv[2]).read_text()),
        )
    )
