"""Hashes of prefixes of token sequences: one 64-bit hash per block, over all tokens up to its end.

Except for collisions, two prompts have the same hash at a block exactly if they are equal up to the
block's end, so the hash names a KV block that both can use. Workers publish the hashes of the
blocks in their prefix caches, routers compute them for prompts.

Theory of operation. A hash is the sum of the prefix's terms modulo 2**64, and a token's term its id
plus one, times a number that is drawn for its position: multilinear hashing (Carter and Wegman,
JCSS 18, 1979; Lemire and Kaser, The Computer Journal 57, 2014). So the hashes of all blocks take
one multiplication per token, and one block can be added later. Two prefixes collide with
probability 2**(k - 64), where 2**k is the largest power of two that divides all differences between
their tokens: in practice k is 0, and below 18 if ids are below 2**18. The numbers are
splitmix64's (Sebastiano Vigna, after Steele, Lea and Flood, OOPSLA 2014).

Use the hash only to guess where a prompt's KV is. It is linear and without a key: other tokens with
the same hash are found in seconds, by a lattice's short vectors. An attacker can cause a wrong
guess, and gains nothing if engines compare tokens by their own means: vLLM's prefix cache by
SHA-256, kept KV by a keyed mark (`workers/llm/vllm/check.py`). The simulated engine finds blocks by
this hash, because its KV is that number.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Tokens = Sequence[int] | npt.NDArray[np.int32]

_MASK = (1 << 64) - 1
STRIDE = np.uint64(0x9E3779B97F4A7C15)  # odd: positions stay apart
# Arrays without dimensions: as operands they are faster than scalars in NumPy.
_ONE = np.array(1, np.uint64)
_V1, _V2 = np.array(0xBF58476D1CE4E5B9, np.uint64), np.array(0x94D049BB133111EB, np.uint64)
_S30, _S27, _S31 = (np.array(shift, np.uint64) for shift in (30, 27, 31))


def mix(values: Words) -> Words:
    """Scramble 64-bit integers, one to one."""
    values = (values ^ (values >> _S30)) * _V1
    values = (values ^ (values >> _S27)) * _V2
    return values ^ (values >> _S31)


def _factors(first: int, end: int) -> Words:
    """Return the factors of the tokens at these positions, from 0."""
    return mix(np.arange(first + 1, end + 1, dtype=np.uint64) * STRIDE)


_FACTORS = _factors(0, 1 << 17)  # for longer prompts, factors take three times as long as the rest


def terms(tokens: Tokens, first: int = 0) -> Words:
    """Return each token's term in its prefix's sum; `first` is the position of tokens[0]."""
    values, factors = _pairs(tokens, first)
    values *= factors
    return values


def _pairs(tokens: Tokens, first: int) -> tuple[Words, Words]:
    """Return the two factors of each token's term."""
    values = np.asarray(tokens).astype(np.uint64)
    values += _ONE
    end = first + len(values)
    return values, _FACTORS[first:end] if end <= len(_FACTORS) else _factors(first, end)


def chain(tokens: Tokens, block_size: int, previous: int | None = None, first: int = 0) -> Words:
    """Return the hash of each full block, in order: shape (len(tokens) // block_size,).

    Token ids are from 0; block_size is in tokens. For blocks after the one with hash `previous`,
    `first` is the position of tokens[0]. For a scope's first block, `previous` is its salt.
    """
    full = len(tokens) // block_size
    values, factors = _pairs(tokens[: full * block_size], first)
    shape = full, block_size
    sums: Words = np.add.accumulate(np.vecdot(values.reshape(shape), factors.reshape(shape)))
    if previous is not None:
        sums += np.uint64(previous)
    return sums


def salt_of(scope: str) -> int:
    """Return the start value of a scope's hashes, in place of a previous block; 0 without a scope.

    Prompts of different scopes share no KV, so they have no hash in common.
    """
    if not scope:
        return 0
    return int.from_bytes(blake2b(scope.encode(), digest_size=8).digest(), "little")


def extend(previous: int | None, tokens: Sequence[int], first: int) -> int:
    """Return the hash of the block `tokens` that follows the block with hash `previous`.

    `first` is the position of tokens[0]; without a previous block it is 0.
    """
    return ((previous or 0) + int(np.sum(terms(tokens, first), dtype=np.uint64))) & _MASK


def pack(hashes: Sequence[int] | Words) -> bytes:
    """Return hashes as bytes for the log: little-endian unsigned 64-bit."""
    return np.asarray(hashes, "<u8").tobytes()


def unpack(data: bytes) -> list[int]:
    """Return the hashes of `pack`'s bytes. Raise ValueError unless a multiple of 8 bytes."""
    if len(data) % 8:
        raise ValueError(f"block hashes: expected a multiple of 8 bytes, found {len(data)}")
    hashes: list[int] = np.frombuffer(data, "<u8").tolist()
    return hashes
