"""Compares a deployment's answers with those of one engine alone, token by token.

The engine runs as a separate process (`python -m infra.demo.reference_engine SETTINGS ANSWERS`),
because vLLM re-imports the main module. It starts beside the deployment, reads requests, and writes
its answers as JSON. It is a replica without connector and peers: the simplest way to the right
answer.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.processes.supervisor import start_process
from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.engine_alone import generate_answers
from infra.stack.engine_source import engine_source
from infra.stack.launcher import Stack
from infra.stack.plan import engine_environ
from infra.story.story import Story
from schemas.codec import Codec
from schemas.errors import EngineFailed
from schemas.records import Request, Role
from schemas.rules.tokens import pack_tokens, unpack_tokens
from workers.llm.vllm.preload import BIND_VARIABLE

_LIMIT_S = 300.0  # for the engine to read and answer; without a limit, a hang would block the demo


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerVerdict:
    """Whether one answer equals that of the engine alone."""

    request_id: str
    tokens: int
    equal: bool
    first_difference: int  # token number, -1 for none


class ReferenceEngine:
    """Starts at once beside a stack, with its fork server; call `compare` once, `stop` always."""

    def __init__(self, stack: Stack) -> None:
        self._codec, self._parts_by_id, self._has_exited = (
            Codec(),
            dict[str, list[Request]](),
            False,
        )
        self._folder = stack.folder / "reference"
        self._folder.mkdir(exist_ok=True)
        self._answers, self._log = self._folder / "answers", self._folder / "log"
        settings_file = self._folder / "settings.toml"
        settings_file.write_text(configuration.dump(stack.settings))
        files = (str(settings_file), str(self._answers))
        command = [sys.executable, "-m", "infra.demo.reference_engine", *files]
        # Not bound: all cores are assigned to the stack.
        environ = {**engine_environ(stack.plan, stack.folder), BIND_VARIABLE: "nobind"}
        read_end, write_end = os.pipe()
        self._requests = open(write_end, "wb", buffering=0)  # open until all requests are sent
        with self._log.open("wb") as log, open(read_end, "rb") as requests:
            self._process = start_process(
                command, environ, (requests, log), stack.forks.get("prefill")
            )

    def ask(self, stories: Sequence[Story]) -> None:
        """Send the engine requests that it has not got yet; blocks while its pipe is full."""
        with self._bounded():
            self._ask(stories)

    def _ask(self, stories: Sequence[Story]) -> None:
        new = [story for story in stories if story.request.request_id not in self._parts_by_id]
        for story in new:
            parts = self._parts_by_id[story.request.request_id] = parts_of(story)
            lines = "".join(f"{self._codec.encode(part).hex()}\n" for part in parts)
            with contextlib.suppress(BrokenPipeError):  # it has ended; its log has the reason
                self._requests.write(lines.encode())

    def compare(self, stories: Sequence[Story]) -> list[AnswerVerdict]:
        """Return a verdict for each answer; blocks until the engine has answered.

        Raises EngineFailed, with the end of its log, if it has failed.
        """
        with self._bounded():
            self._ask(stories)
            self._requests.close()
            exit_code = self._process.wait()
            self._has_exited = True
        if exit_code:
            raise EngineFailed(
                f"the reference engine ended early, or was ended as it took over {_LIMIT_S:g} s: "
                f"{self._log.read_text()[-2_000:]}"
            )
        token_lists = iter(json.loads(self._answers.read_text()))
        alone = {
            name: [*itertools.chain.from_iterable(itertools.islice(token_lists, len(parts)))]
            for name, parts in self._parts_by_id.items()
        }
        return [_verdict(story, alone[story.request.request_id]) for story in stories]

    def stop(self) -> None:
        """End the engine, so that threads that wait for it return; nothing if it has ended."""
        self._kill()
        if not self._requests.closed:
            self._requests.close()
            self._process.wait()
            self._has_exited = True

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """End the engine after the limit, so that writes to it and waits for it return."""
        timer = threading.Timer(_LIMIT_S, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        if not self._has_exited:
            for kill in (os.killpg, os.kill):  # a process that is just starting leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self._process.pid, signal.SIGKILL)


def parts_of(story: Story) -> list[Request]:
    """Return what the engine is to answer: the answer in consecutive parts.

    The first part begins with the prompt that workers got, with its passages, and later ones where
    a probe inserted tokens. Each ends where the next one begins.
    """
    request, prompts = story.request, [work.prompt_tokens for work in story.work[-1:]]
    prompt = next(iter(prompts), request.prompt_tokens)
    sampling = request.sampling
    parts, begin = [], 0
    for seq, tokens in [*_probe_inserts(story), (sampling.max_tokens, b"")]:
        min_tokens = max(0, min(seq, sampling.min_tokens) - begin)
        sampled = dataclasses.replace(sampling, max_tokens=seq - begin, min_tokens=min_tokens)
        parts.append(dataclasses.replace(request, prompt_tokens=prompt, sampling=sampled))
        prompt += pack_tokens(story.token_ids[begin:seq]) + tokens
        begin = seq
    return parts


def _probe_inserts(story: Story) -> list[tuple[int, bytes]]:
    """Return what each probe inserted first, with the answer's token that it precedes."""
    probes: dict[int, tuple[int, bytes]] = {}
    for retrieved in story.retrieved:
        if retrieved.probe:
            probes.setdefault(retrieved.probe, (retrieved.seq, retrieved.tokens))
    return [(seq, tokens) for _, (seq, tokens) in sorted(probes.items()) if tokens]


def _verdict(story: Story, alone: list[int]) -> AnswerVerdict:
    token_ids, equal = story.token_ids, story.token_ids == alone
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, alone, strict=False))
    return AnswerVerdict(
        request_id=story.request.request_id,
        tokens=len(alone),
        equal=equal,
        first_difference=-1 if equal else len(list(same)),
    )


async def _main(settings: Settings) -> list[list[int]]:
    engine, codec = await engine_source(settings, "reference", [Role.REPLICA])(1), Codec()
    token_lists = []
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = codec.decode(bytes.fromhex(line))
            assert isinstance(request, Request), f"expected a request, found {request}"
            prompt = (unpack_tokens(request.prompt_tokens), request.sampling)
            token_lists += [
                answer.token_ids for answer in await generate_answers(engine, [prompt], at_once=1)
            ]
    finally:
        await engine.close()
    return token_lists


if __name__ == "__main__":
    token_lists = asyncio.run(_main(configuration.load(Path(sys.argv[1]), environ={})))
    Path(sys.argv[2]).write_text(json.dumps(token_lists))
