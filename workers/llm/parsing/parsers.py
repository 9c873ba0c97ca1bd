"""What a worker needs to parse answers into content, reasoning and tool calls.

`workers/llm/parsing/vllm_parser.py` implements it with vLLM's parsers. A parser is a pure function
of the answer's tokens, which it gets one by one, so every attempt at an answer makes the same
deltas, however the engine groups its tokens. An attempt that continues an answer feeds the prior
tokens first (`workers/llm/parsing/replays.py`). `workers/llm/active_requests.py` calls the parser
of a request for each output.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from schemas.errors import WorkerRefused
from schemas.model.files import model_folder
from schemas.model.parsers import NO_PARSERS, known_parsers, parsers_of
from schemas.records import AnswerDelta, Sampling, Work
from schemas.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class ParsedEnd:
    """What the end of an answer adds: deltas, the finish reason, and the count of its reasoning."""

    deltas: Sequence[AnswerDelta]
    finish_reason: str
    reasoning_tokens: int


class AnswerParser(Protocol):
    """The parser of one answer."""

    @property
    def sampling(self) -> Sampling:
        """Return the sampling for the engine, with the form that the tool choice demands."""

    @property
    def binds_reasoning(self) -> bool:
        """Return whether the form binds the reasoning too, and not only what follows it."""

    @property
    def thinking_end(self) -> str:
        """Return the text that ends reasoning; empty if the model or its parser has none."""

    def feed(self, token_ids: Sequence[int]) -> list[AnswerDelta]:
        """Take the next tokens; return their deltas. Raises InvalidAnswer if parsing fails."""

    def finish(self, finish_reason: str) -> ParsedEnd:
        """End the answer, which the engine ended for `finish_reason`, `stop` or `length`."""


class Parsers(Protocol):
    """The parsers of one model."""

    def begin(self, work: Work, prompt: Sequence[int]) -> AnswerParser:
        """Return a parser for an answer, which has to take the answer's prior tokens first.

        `prompt` has the token ids of `work`, with these tokens at its end. Raises InvalidRequest if
        the tools of `work` cannot be used.
        """


def parser_of(work: Work, prompt: Sequence[int], parsers: Parsers | None) -> AnswerParser:
    """Return the parser of an answer that is not text; raises WorkerRefused without parsers."""
    if parsers is None:
        raise WorkerRefused(
            f"worker {work.worker_id} has no parser of tool calls or reasoning: start it with "
            f"model.tool_parser and model.reasoning_parser of its gateways; "
            f"request {work.request_id}"
        )
    return parsers.begin(work, prompt)


async def load_parsers(model: ModelSettings) -> Parsers | None:
    """Load the parsers of the settings; None if the model has neither.

    Importing them takes 13 s of CPU time and 1 GB in a process without vLLM. A thread does it.
    Raises ConfigError for an unknown parser, or if the tokenizer lacks tokens that it needs.
    """
    names = parsers_of(model) if model.revision else known_parsers(model)
    if names == NO_PARSERS:
        return None

    def load() -> Parsers:
        module = import_module("workers.llm.parsing.vllm_parser")
        parsers: Parsers = module.VllmParsers(model_folder(model), model.served_name, names)
        return parsers

    return await asyncio.to_thread(load)
