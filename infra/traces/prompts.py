"""Makes prompts for a trace without texts: token ids that are equal wherever its blocks are.

A block id determines its tokens. Prompts without block ids share a prefix only within their
session: each turn's prompt is the beginning of one sequence, so that a longer one extends a shorter
one. Token ids are those of bytes, which every vocabulary of byte pairs has.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from infra.traces.trace import Arrival, Trace

_IDS = (32, 256)  # after special tokens, before merges


def token_ids(trace: Trace, arrival: Arrival) -> list[int]:
    """Return as many token ids as the prompt is long."""
    length, size = arrival.prompt_tokens, trace.block_tokens
    ids: list[int] = []
    for block in arrival.blocks:
        ids += _random_ids(f"block {block}", size)
    if len(ids) < length:
        name = f"own {arrival.session_id or arrival.request_id or arrival.at_ms}"
        ids += _random_ids(name, length)[len(ids) :]
    return ids[:length]


@lru_cache(maxsize=65_536)
def _random_ids(name: str, tokens: int) -> tuple[int, ...]:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
    ids: list[int] = np.random.default_rng(seed).integers(*_IDS, tokens).tolist()
    return tuple(ids)


def body(trace: Trace, arrival: Arrival, model: str) -> dict[str, Any]:
    """Return a call of `/v1/completions` with that prompt; its answer is as long as the trace's."""
    return {
        "model": model,
        "prompt": token_ids(trace, arrival),
        "max_tokens": max(1, arrival.output_tokens),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
