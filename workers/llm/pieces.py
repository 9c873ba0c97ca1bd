"""Splits an output of several tokens into outputs of one token each. Pure.

An engine whose outputs are collected late returns several tokens at once. Rules that depend on a
token's position must not depend on that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from workers.llm.engine import Output

_CONTEXT_TOKENS = 8  # decoded before the first, so that spaces and characters are the answer's
_INCOMPLETE = "\ufffd"


def texts_of(
    decode: Callable[[list[int]], str], before: Sequence[int], output: Output
) -> list[str]:
    """Return what each token adds to the text; joined, they are the output's text.

    `before` are the answer's tokens before the output.
    """
    window = list(before[-_CONTEXT_TOKENS:])
    whole = len(window)
    while (prior_text := decode(window[:whole])).endswith(_INCOMPLETE):
        whole -= 1  # this token's text comes with a later one
    pieces: list[str] = []
    for token in output.token_ids:
        window.append(token)
        text = decode(window)
        is_whole = text.startswith(prior_text) and not text.endswith(_INCOMPLETE)
        pieces.append(text[len(prior_text) :] if is_whole else "")
        prior_text = text if is_whole else prior_text
    if "".join(pieces) == output.text:
        return pieces
    return [""] * (len(pieces) - 1) + [output.text]  # text may always lag its tokens


class TextSteps:
    """The text that each further token adds, as vLLM and tokenizers' decode stream define it."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode, self._ids = decode, list(prompt[-_CONTEXT_TOKENS:])
        self._prefix, self._prefix_ids = "", 0
        text = decode(self._ids)
        if text.endswith(_INCOMPLETE):  # then the first text begins with the prompt's
            self._ids = list(prompt)
        else:
            self._prefix, self._prefix_ids = text, len(self._ids)

    def step(self, token: int) -> str:
        """Return the text that a token completes; none within a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.startswith(self._prefix):
            self._ids, self._prefix, self._prefix_ids = [token], "", 0
            text = self._decode(self._ids)
        if len(text) <= len(self._prefix) or text.endswith(_INCOMPLETE):
            return ""
        added = text[len(self._prefix) :]
        self._ids = self._ids[self._prefix_ids :]
        self._prefix, self._prefix_ids = self._decode(self._ids), len(self._ids)
        return added


def repeated_chars(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> int:
    """Return how many characters of the prompt tokenizers' decode stream puts before an answer.

    If the prompt ends within a character, as that of a continued answer may, these are all of its
    whole characters; otherwise 0.
    """
    if not decode(list(prompt[-_CONTEXT_TOKENS:])).endswith(_INCOMPLETE):
        return 0
    tokens = list(prompt)
    while (whole := decode(tokens)).endswith(_INCOMPLETE):
        tokens.pop()
    return len(whole)


def split(output: Output, texts: Sequence[str]) -> list[Output]:
    """Return one output per token; the first has the KV received, the last the finish and `kv`."""
    ids, logprobs = output.token_ids, output.logprobs
    parts = [
        replace(
            output,
            token_ids=(token,),
            text=text,
            logprobs=logprobs[place : place + 1],
            finish_reason="",
            stop_reason="",
            kv=None,
            kv_bytes=0,
            transfer_ms=0.0,
            kv_missed=None,
        )
        for place, (token, text) in enumerate(zip(ids, texts, strict=True))
    ]
    first, last = parts[0], parts[-1]
    first.kv_bytes, first.transfer_ms = output.kv_bytes, output.transfer_ms
    first.kv_missed = output.kv_missed
    last.finish_reason, last.stop_reason = output.finish_reason, output.stop_reason
    last.kv = output.kv
    return parts
