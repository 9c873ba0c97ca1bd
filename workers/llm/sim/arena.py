"""The simulated KV cache: real memory, whose bytes are a function of the tokens so far.

A full block contains its hash (`schemas/prefix.py`: of all tokens up to its end, from a start value
of the model or adapter), multiplied by a factor for each of its words. A partial block contains the
sum of its own tokens' terms in the same way. Reading a block uses every word: intact bytes give the
value back, any others another number. The next token is sampled from the values *read* from all
blocks, so a wrong, missing, stale or wrongly transposed block changes the answer. The words of a
block are those of its KV heads, in order; each rank of tensor parallelism has its share. Integers
are modulo 2**64.

It has no notion of requests; `batch.py` and `engine.py` call it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas import prefix
from schemas.prefix import Words
from schemas.prefix import mix as mix_all

MASK = (1 << 64) - 1
FOLD = 0x9E3779B97F4A7C15  # odd, so that multiplication is invertible
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    """Return `schemas.prefix.mix` of one number, without an array."""
    value = ((value ^ (value >> 30)) * _M1) & MASK
    value = ((value ^ (value >> 27)) * _M2) & MASK
    return value ^ (value >> 31)


EMPTY = 0  # the canonical hash of no tokens


@dataclass(frozen=True, slots=True)
class Digest:
    """The contents of blocks: a hash per full block, and the sum of the open block's terms."""

    chain: Sequence[int]
    tail: int
    tail_tokens: int

    @property
    def blocks(self) -> int:
        """Return the number of blocks, including the open one."""
        return len(self.chain) + bool(self.tail_tokens)

    def values(self, first: int) -> Words:
        """Return the values of the blocks from `first` on, as uint64."""
        tail = [self.tail] if self.tail_tokens else []
        return np.array([*self.chain, *tail][first:], np.uint64)


class KvArena:
    """Memory for `block_count` blocks; `regions` has the shape (ranks, blocks, words of a share).

    A block is padded so that every one of `heads` KV heads has the same number of words.
    """

    def __init__(
        self,
        block_count: int,
        block_tokens: int,
        bytes_per_token: int,
        *,
        heads: int = 4,
        tensor_parallel: int = 1,
    ) -> None:
        words = heads * max(1, -(-block_tokens * bytes_per_token // (8 * heads)))
        self.block_tokens = block_tokens
        self.block_bytes = words * 8
        shape = tensor_parallel, block_count, words // tensor_parallel
        self.regions: Words = np.empty(shape, np.uint64)
        self.regions.fill(0)  # touched now, so that no step has page faults
        odd = np.arange(words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        spread = mix_all(odd) | np.uint64(1)
        gather = mix_all(odd + np.uint64(1 << 32)) | np.uint64(1)
        total = int(np.dot(spread, gather))
        if not total % 2:  # an even number of words; the inverse needs an odd sum
            gather[0] -= np.uint64(1)
            total = int(np.dot(spread, gather))
        gather *= np.uint64(pow(total, -1, 1 << 64))
        self._ranks = list(  # each rank's region, and its share of the words' factors
            zip(
                self.regions,
                spread.reshape(tensor_parallel, -1),
                gather.reshape(tensor_parallel, -1),
                strict=True,
            )
        )

    def digest(self, tokens: Sequence[int], start: int = 0) -> Digest:
        """Return the digest of a whole token sequence; `start` is the hash of no tokens."""
        values = np.asarray(tokens, np.int32)
        chain = prefix.chain(values, self.block_tokens, start)
        first = len(chain) * self.block_tokens
        tail = int(np.sum(prefix.terms(values[first:], first), dtype=np.uint64))
        if not first:  # the open block is the first one
            tail = (tail + start) & MASK
        return Digest(chain.tolist(), tail, len(values) - first)

    def write(self, blocks: Any, values: Words) -> None:
        """Fill whole blocks: write `values[i]`, a uint64, into block `blocks[i]`."""
        for region, spread, _ in self._ranks:
            region[blocks] = values[:, None] * spread

    def read(self, blocks: Any) -> Words:
        """Return the value of each block, as uint64, computed from all of its bytes."""
        values: Words = np.zeros(len(blocks), np.uint64)
        for region, _, gather in self._ranks:
            values += region[blocks] @ gather
        return values

    def copy(self, source: Sequence[int], to: Sequence[int]) -> None:
        """Copy block `source[i]` of this arena into its block `to[i]`."""
        self.regions[:, list(to)] = self.regions[:, list(source)]

    def state(self, blocks: Sequence[int], tail_tokens: int) -> tuple[int, int, int]:
        """Return the folded state of the full blocks, the hash of the last one, and the sum of the
        open one."""
        values = self.read(list(blocks)).tolist() if blocks else []
        tail = values.pop() if tail_tokens else 0
        folded = 0
        for value in values:
            folded = mix((folded + value * FOLD) & MASK)
        return folded, (values[-1] if values else EMPTY), tail
