"""Asks one engine alone the questions that a deployment answered, and compares token by token.

Runs as a process of its own (`python -m infra.demo.reference_engine SETTINGS REQUESTS`), because
vLLM re-imports the main module; prints its answers as JSON. The engine is a replica: no connector,
no peer, the plainest way to the right answer.
"""

import asyncio
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.engine_alone import answers
from infra.stack.engine_source import engine_source
from infra.story.story import Story
from schemas.codec import Codec
from schemas.errors import EngineFailed
from schemas.records import Request, Role
from schemas.rules.tokens import unpack_tokens


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
    codec = Codec()
    requests = [codec.encode(_with_whole_prompt(story)).hex() for story in stories]
    with tempfile.TemporaryDirectory() as folder:
        settings_file, requests_file = Path(folder) / "settings.toml", Path(folder) / "requests"
        settings_file.write_text(configuration.dump(settings))
        requests_file.write_text("\n".join(requests))
        files = [str(settings_file), str(requests_file)]
        command = [sys.executable, "-m", "infra.demo.reference_engine", *files]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise EngineFailed(f"the reference engine ended early: {done.stderr[-2_000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return [_verdict(story, tokens) for story, tokens in zip(stories, said, strict=True)]


def _with_whole_prompt(story: Story) -> Request:
    """The request as workers got it: with what was looked up for it."""
    given = [work.prompt_tokens for work in story.work[-1:]]
    return dataclasses.replace(
        story.request, prompt_tokens=next(iter(given), story.request.prompt_tokens)
    )


def _verdict(story: Story, alone: list[int]) -> Verdict:
    given, equal = story.token_ids, story.token_ids == alone
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(given, alone, strict=False))
    return Verdict(
        request_id=story.request.request_id,
        tokens=len(alone),
        equal=equal,
        first_difference=-1 if equal else len(list(same)),
    )


async def _main(settings: Settings, requests: Sequence[Request]) -> None:
    engine = await engine_source(settings, "reference", [Role.REPLICA])(1)
    try:
        asked = [(unpack_tokens(each.prompt_tokens), each.sampling) for each in requests]
        given = await answers(engine, asked, at_once=1)
    finally:
        await engine.close()
    sys.stdout.write(json.dumps([answer.token_ids for answer in given]) + "\n")


if __name__ == "__main__":
    lines = Path(sys.argv[2]).read_text().splitlines()
    made = configuration.load(Path(sys.argv[1]), environ={})
    asyncio.run(_main(made, [Codec().decode(bytes.fromhex(line)) for line in lines]))
