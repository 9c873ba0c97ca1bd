"""The simulated KV cache: real memory whose bytes are a function of the tokens so far.

A full block holds its chain value (a 64-bit hash of all tokens up to its end) multiplied out over
all of its words; a partial block holds a polynomial of its own tokens in the same way. Reading a
block takes every word into account: intact bytes give the value back, anything else gives another
number. The state that the next token is drawn from folds the values *read* from all blocks, so a
wrong, missing or stale block changes the answer.

Decides nothing and knows no requests; `sim_batch.py` and `sim_engine.py` call it. Integers are
modulo 2**64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
FOLD = 0x9E3779B97F4A7C15  # odd, so that multiplying loses nothing
TOKEN = 0x2545F4914F6CDD1D  # the polynomial's base
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_V1, _V2 = np.uint64(_M1), np.uint64(_M2)


def mix(value: int) -> int:
    """A bijective scrambling of 64 bits (splitmix64)."""
    value = ((value ^ (value >> 30)) * _M1) & MASK
    value = ((value ^ (value >> 27)) * _M2) & MASK
    return value ^ (value >> 31)


def mix_all(values: Words) -> Words:
    """`mix` of every element."""
    values = (values ^ (values >> _S30)) * _V1
    values = (values ^ (values >> _S27)) * _V2
    return values ^ (values >> _S31)


@dataclass(frozen=True, slots=True)
class Digest:
    """What blocks must hold: a chain value per full block, and the open one's polynomial."""

    chain: Sequence[int]
    tail: int
    tail_tokens: int


class KvArena:
    """One contiguous piece of memory, cut into blocks."""

    def __init__(self, block_count: int, block_tokens: int, bytes_per_token: int) -> None:
        words = max(1, block_tokens * bytes_per_token // 8)
        self.block_tokens = block_tokens
        self.block_bytes = words * 8
        self.words: Words = np.empty((block_count, words), np.uint64)
        self.words.fill(0)  # touched now: a page fault later would cost a step its time
        odd = np.arange(words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._spread: Words = mix_all(odd) | np.uint64(1)
        self._gather: Words = mix_all(odd + np.uint64(1 << 32)) | np.uint64(1)
        total = int(np.dot(self._spread, self._gather))
        if not total % 2:  # an even number of words; the inverse needs an odd sum
            self._gather[0] -= np.uint64(1)
            total = int(np.dot(self._spread, self._gather))
        self._inverse = np.uint64(pow(total, -1, 1 << 64))
        powers = [pow(TOKEN, i, 1 << 64) for i in range(block_tokens - 1, -1, -1)]
        self._powers: Words = np.array(powers, np.uint64)

    def digest(self, tokens: Sequence[int]) -> Digest:
        """Values of a whole token sequence."""
        values = np.asarray(tokens, np.uint64) + np.uint64(1)
        size = self.block_tokens
        full = len(values) // size
        chain: list[int] = []
        previous = 0
        for value in (values[: full * size].reshape(full, size) @ self._powers).tolist():
            previous = mix((previous * FOLD + value) & MASK)
            chain.append(previous)
        rest = values[full * size :]
        tail = int(np.dot(rest, self._powers[size - len(rest) :])) if len(rest) else 0
        return Digest(chain, tail, len(rest))

    def write(self, blocks: Any, values: Words) -> None:
        """Fill whole blocks with their values."""
        self.words[blocks] = values[:, None] * self._spread

    def read(self, blocks: Any) -> Words:
        """The values that the blocks hold, from all of their bytes."""
        values: Words = (self.words[blocks] @ self._gather) * self._inverse
        return values

    def state(self, blocks: Sequence[int], tail_tokens: int) -> tuple[int, int, int]:
        """Folded state of the full blocks, last chain value, and the open block's polynomial."""
        values = self.read(list(blocks)).tolist() if blocks else []
        tail = values.pop() if tail_tokens else 0
        folded = 0
        for value in values:
            folded = mix((folded + value * FOLD) & MASK)
        return folded, (values[-1] if values else 0), tail
