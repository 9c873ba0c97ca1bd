"""An output of several tokens as outputs of one each. Pure.

An engine that was not heard for a while says several tokens at once. Where something depends on
which token stands where, it must not depend on that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from workers.llm.engine import Output

_CONTEXT_TOKENS = 8  # before the first, so that spaces and characters come out as in the answer
_INCOMPLETE = "\ufffd"


def texts_of(
    decode: Callable[[list[int]], str], before: Sequence[int], output: Output
) -> list[str]:
    """What each token adds to the text; joined they are the output's."""
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
    return [""] * (len(pieces) - 1) + [output.text]  # text lags its tokens as it may always


def repeated_chars(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> int:
    """How much of its prompt an answer's first text repeats in a stream of tokenizers: all whole
    characters, where the prompt ends within one, as that of an answer that goes on may; else none.
    """
    if not decode(list(prompt[-_CONTEXT_TOKENS:])).endswith(_INCOMPLETE):
        return 0
    tokens = list(prompt)
    while (whole := decode(tokens)).endswith(_INCOMPLETE):
        tokens.pop()
    return len(whole)


def split(output: Output, texts: Sequence[str]) -> list[Output]:
    """One for each token; what the output tells besides comes with the last, or the first."""
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
