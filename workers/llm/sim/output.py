"""Outputs of the simulated engine: a cheap kind for plain tokens, and a writer for all that needs
more care.

`Writer` applies stop strings, stop tokens and synthetic log-probabilities to one answer. Pure.
"""

import math
from collections.abc import Sequence
from typing import Any

from schemas.errors import TriviumError
from schemas.records import Sampling, TokenLogprob, TopLogprob
from workers.llm.engine import Output
from workers.llm.sim.arena import MASK, mix
from workers.llm.sim.vocabulary import Vocabulary
from workers.llm.text import StopText

_UNIT = float(1 << 64)


class PlainOutput(Output):
    """An Output that is just tokens: all else lies in the class, which makes it far cheaper."""

    __slots__ = ()
    logprobs: Any = ()
    finish_reason: Any = ""
    stop_reason: Any = ""
    error: Any = None
    kv: Any = None
    kv_bytes: Any = 0
    transfer_ms: Any = 0.0
    __setattr__: Any = object.__setattr__


_new: Any = object.__new__


def plain_outputs(
    rows: Sequence[Any], picks: Sequence[int], vocabulary: Vocabulary
) -> list[Output]:
    """One output per row, with the token that it drew."""
    outputs: list[Output] = []
    append, ids, texts = outputs.append, vocabulary.ids, vocabulary.texts
    for row, pick in zip(rows, picks, strict=True):
        output = _new(PlainOutput)
        output.request_id = row.request_id
        output.token_ids = ids[pick]
        output.text = texts[pick]
        output.cached_tokens = row.cached_tokens
        append(output)
    return outputs


def failed(request_id: str, error: TriviumError) -> Output:
    """The last output of a job that went wrong."""
    return Output(request_id=request_id, finish_reason="error", error=error.to_wire())


class Writer:
    """Text, log-probabilities and stop conditions of one answer that needs them."""

    def __init__(self, sampling: Sampling, vocabulary: Vocabulary) -> None:
        self._sampling, self._vocabulary = sampling, vocabulary
        self._text = StopText(sampling.stop, include_stop=sampling.include_stop)
        self._stop_ids = frozenset(sampling.stop_token_ids)

    @staticmethod
    def is_needed(sampling: Sampling) -> bool:
        return bool(sampling.stop or sampling.stop_token_ids or sampling.logprobs is not None)

    def feed(self, pick: int, drawn: int) -> tuple[str, str | None]:
        """The text that may be shown, and the reason to stop, if any."""
        token_id, may_stop = self._vocabulary.ids[pick][0], drawn > self._sampling.min_tokens
        if token_id in self._stop_ids and may_stop:
            piece = self._vocabulary.special_texts[pick] if self._sampling.include_stop else ""
            return self._text.feed(piece, may_stop=False) + self._text.flush(), str(token_id)
        text = self._text.feed(self._vocabulary.texts[pick], may_stop=may_stop)
        return text, self._text.matched or None

    def flush(self) -> str:
        """Text held back; the answer has ended."""
        return self._text.flush()

    def logprobs(self, pick: int, raw: int) -> Sequence[TokenLogprob]:
        """The drawn token and rivals that share what probability it leaves."""
        count = self._sampling.logprobs
        if count is None:
            return ()
        size = self._vocabulary.size + 1
        share = 0.35 + 0.6 * mix(raw) / _UNIT
        chosen = self._top(pick, share)
        rivals_count = max(0, min(count, size) - 1)
        first = pick + 1 + mix((raw + 1) & MASK) % (size - rivals_count)
        rivals = [(first + i) % size for i in range(rivals_count)]
        tops = [self._top(at, (1 - share) * 0.5 ** (i + 1)) for i, at in enumerate(rivals)]
        top = (chosen, *tops) if count else ()
        return (
            TokenLogprob(
                token_id=chosen.token_id, token=chosen.token, logprob=chosen.logprob, top=top
            ),
        )

    def _top(self, pick: int, share: float) -> TopLogprob:
        return TopLogprob(
            token_id=self._vocabulary.ids[pick][0],
            token=self._vocabulary.special_texts[pick],
            logprob=math.log(share),
        )
