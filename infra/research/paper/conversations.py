"""Conversations like those of the paper's figures 4 and 5: ShareGPT's and WildChat's.

The authors take conversations of at least two turns, with messages of at most 2 048 tokens and
contexts of at most 8 192. `read` takes them from files. Otherwise lengths are drawn from
distributions with the published means; numbers of turns are those of the authors' raw results.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from infra.simulator.cluster import READY_MS
from infra.simulator.traffic.poisson import unique_tokens
from infra.simulator.traffic.script import SimConversation, SimTurn, conversation
from schemas.errors import ConfigError

TOKENS_MIN, TOKENS_MAX = 4, 2_048  # of a question and of an answer
CONTEXT_MAX = 8_192
TURNS_MIN, TURNS_MAX = 2, 20
CHARS_PER_TOKEN = 4  # for files with text; the authors' loader does so without a tokenizer
RESERVOIR_MAX = 2_000  # conversations kept of a file
_READ_CHARS = 1 << 20

Messages = tuple[tuple[int, int], ...]  # (prompt, answer) tokens of each turn


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """Tokens of a message: exponential if the deviation equals the mean, else log-normal."""

    mean: float
    deviation: float

    def sample(self, rng: np.random.Generator) -> int:
        """Return the tokens of one message; longer ones than `TOKENS_MAX` are drawn again."""
        while (tokens := self._sample_once(rng)) > TOKENS_MAX:
            pass
        return max(TOKENS_MIN, int(tokens))

    def _sample_once(self, rng: np.random.Generator) -> float:
        if self.deviation == self.mean:
            return float(rng.exponential(self.mean))
        variance = float(np.log1p((self.deviation / self.mean) ** 2))
        return float(rng.lognormal(np.log(self.mean) - variance / 2, variance**0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSource:
    """A set of conversations: recorded ones, or distributions of their lengths."""

    name: str
    prompt_length: LengthDistribution = LengthDistribution(mean=0.0, deviation=0.0)
    answer_length: LengthDistribution = LengthDistribution(mean=0.0, deviation=0.0)
    turns_mean: float = 0.0
    recorded_chats: tuple[Messages, ...] = ()

    def messages(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yield prompt and answer tokens of one conversation, turn by turn."""
        if self.recorded_chats:
            yield from self.recorded_chats[rng.integers(len(self.recorded_chats))]
            return
        extra = rng.geometric(1 / (self.turns_mean - TURNS_MIN + 1)) - 1
        for _ in range(min(TURNS_MIN + int(extra), TURNS_MAX)):
            yield self.prompt_length.sample(rng), self.answer_length.sample(rng)


ASKED_TOKENS, ANSWERED_TOKENS = 161.31, 337.99  # ShareGPT (Kwon et al., SOSP 2023, figure 11)
SHAREGPT = ConversationSource(
    name="ShareGPT",
    prompt_length=LengthDistribution(mean=ASKED_TOKENS, deviation=ASKED_TOKENS),
    answer_length=LengthDistribution(mean=ANSWERED_TOKENS, deviation=ANSWERED_TOKENS),
    turns_mean=2_204 / 500,
)
WILDCHAT = (
    ConversationSource(  # means and deviations of its paper (Zhao et al., ICLR 2024, table 1)
        name="WildChat",
        prompt_length=LengthDistribution(mean=295.58, deviation=1_609.18),
        answer_length=LengthDistribution(mean=441.34, deviation=410.91),
        turns_mean=2_056 / 500,
    )
)
SYNTHETIC = (SHAREGPT, WILDCHAT)


def read(path: Path, seed: int) -> ConversationSource:
    """Read a file of ShareGPT (`from`, `value`) or WildChat (`role`, `content`).

    The file has a JSON array, or an object per line, each with `conversations`. Raises ConfigError
    if no conversation is usable.
    """
    rng, reservoir, chat_count = np.random.default_rng(seed), list[Messages](), 0
    try:
        with path.open(encoding="utf-8") as file:
            for item in _objects(file):
                messages = _messages(item)
                if len(messages) < TURNS_MIN:
                    continue
                chat_count += 1
                at = (
                    len(reservoir)
                    if len(reservoir) < RESERVOIR_MAX
                    else int(rng.integers(chat_count))
                )
                if at < RESERVOIR_MAX:  # each is kept with equal chance
                    reservoir[at : at + 1] = [messages]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chats: {path} cannot be read: {error}") from error
    if not reservoir:
        raise ConfigError(
            f"--chats: expected conversations of {TURNS_MIN} turns and more in {path}, as ShareGPT "
            "or WildChat write them, found none"
        )
    return ConversationSource(name=path.stem, recorded_chats=tuple(reservoir))


def _objects(file: IO[str]) -> Iterator[Any]:
    """Yield the elements of a JSON array, or the objects of lines."""
    decoder, text, at = json.JSONDecoder(), "", 0
    while part := file.read(_READ_CHARS):
        text, at = text[at:] + part, 0
        while True:
            while at < len(text) and text[at] in " \t\r\n,[]":
                at += 1
            try:
                item, at = decoder.raw_decode(text, at)
            except ValueError:
                break  # the object continues in the next part
            yield item


def _messages(item: Any) -> Messages:
    """Return the lengths of a conversation; empty if it is none, or has a long or empty message."""
    messages = item.get("conversations") if isinstance(item, dict) else None
    texts = [_text(message) for message in messages] if isinstance(messages, list) else []
    tokens = [len(text) // CHARS_PER_TOKEN for text in texts]
    if not all(texts) or max(tokens, default=0) > TOKENS_MAX:
        return ()
    lengths = [max(TOKENS_MIN, count) for count in tokens]
    return tuple(zip(lengths[::2], lengths[1::2], strict=False))[:TURNS_MAX]


def _text(message: Any) -> str:
    text = message.get("value", message.get("content")) if isinstance(message, dict) else None
    return text if isinstance(text, str) else ""


def conversations(
    sources: Sequence[ConversationSource],
    per_s: float,
    count: int,
    block_tokens: int,
    seed: int,
    *,
    prefill_heavy: bool = False,
) -> list[SimConversation]:
    """Return `count` conversations of the sources in turn, as a Poisson process without think time.

    `prefill_heavy` keeps only conversations with more prompt than answer tokens.
    """
    rng = np.random.default_rng([seed, int(per_s * 1000)])
    at_ms, arrivals = READY_MS, list[SimConversation]()
    while len(arrivals) < count:
        turns, context_tokens = _turns(sources[len(arrivals) % len(sources)], rng)
        if prefill_heavy and 2 * sum(turn.output_tokens for turn in turns) >= context_tokens:
            continue
        at_ms += rng.exponential(1e3 / per_s)
        tokens = unique_tokens(len(arrivals), context_tokens)
        arrivals.append(conversation(f"s{len(arrivals)}", at_ms, turns, tokens, block_tokens))
    return arrivals


def _turns(source: ConversationSource, rng: np.random.Generator) -> tuple[list[SimTurn], int]:
    """Draw one conversation; return its turns and all of its tokens."""
    turns, context_tokens = list[SimTurn](), 0
    for prompt_tokens, answer_tokens in source.messages(rng):
        if context_tokens + prompt_tokens > CONTEXT_MAX:
            break
        turns.append(
            SimTurn(prompt_tokens=context_tokens + prompt_tokens, output_tokens=answer_tokens)
        )
        context_tokens += prompt_tokens + answer_tokens
    return turns, context_tokens
