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
from schemas.rules.tokens import pack_tokens, unpack_tokens


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
    parts = [parts_of(story) for story in stories]
    requests = [codec.encode(part).hex() for story in parts for part in story]
    with tempfile.TemporaryDirectory() as folder:
        settings_file, requests_file = Path(folder) / "settings.toml", Path(folder) / "requests"
        settings_file.write_text(configuration.dump(settings))
        requests_file.write_text("\n".join(requests))
        files = [str(settings_file), str(requests_file)]
        command = [sys.executable, "-m", "infra.demo.reference_engine", *files]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise EngineFailed(f"the reference engine ended early: {done.stderr[-2_000:]}")
    said = iter(json.loads(done.stdout.splitlines()[-1]))
    alone = [list(itertools.chain.from_iterable(itertools.islice(said, len(p)))) for p in parts]
    return [_verdict(story, tokens) for story, tokens in zip(stories, alone, strict=True)]


def parts_of(story: Story) -> list[Request]:
    """What the engine is to answer, one part of the answer after the other.

    A part begins with the prompt as workers got it, with what was looked up for it, or where a
    probe has put tokens in; it ends where the next one did.
    """
    request, given = story.request, [work.prompt_tokens for work in story.work[-1:]]
    prompt = next(iter(given), request.prompt_tokens)
    sampling = request.sampling
    parts, begin = [], 0
    for seq, tokens in [*_put_in(story), (sampling.max_tokens, b"")]:
        least = max(0, min(seq, sampling.min_tokens) - begin)
        sampled = dataclasses.replace(sampling, max_tokens=seq - begin, min_tokens=least)
        parts.append(dataclasses.replace(request, prompt_tokens=prompt, sampling=sampled))
        prompt += pack_tokens(story.token_ids[begin:seq]) + tokens
        begin = seq
    return parts


def _put_in(story: Story) -> list[tuple[int, bytes]]:
    """What probes have put in, and before which tokens of the answer; the first of each counts."""
    probes: dict[int, tuple[int, bytes]] = {}
    for found in story.retrieved:
        if found.probe:
            probes.setdefault(found.probe, (found.seq, found.tokens))
    return [(seq, tokens) for _, (seq, tokens) in sorted(probes.items()) if tokens]


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
