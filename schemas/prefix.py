"""Names for prefixes of token sequences: one 64-bit hash per block, over all tokens up to its end.

Two prompts have the same hash at a block exactly if they are equal up to the block's end (but for
chance, about 2**-64 a pair), so the hash names a KV block that both can use. Workers publish the
hashes of what their prefix caches hold, routers compute them for prompts.

Theory of operation. A token's term is a scrambled function of the token and its position; the sum
of the terms of a prefix, modulo 2**64, scrambled once more, is its hash. Sums can be formed for
all blocks at once, and one block can be added later, since the scrambling (splitmix64, by
Sebastiano Vigna, after Steele, Lea and Flood, OOPSLA 2014) is a bijection. It is no cryptographic
hash: whoever wants a wrong guess of what is cached can have one, and gains nothing, because
engines compare tokens by their own means.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
STRIDE = np.uint64(0x9E3779B97F4A7C15)  # odd: positions stay apart
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_I1, _I2 = pow(_M1, -1, 1 << 64), pow(_M2, -1, 1 << 64)
# Arrays without dimensions: numpy takes them as operands sooner than scalars.
_V1, _V2 = np.array(_M1, np.uint64), np.array(_M2, np.uint64)
_S30, _S27, _S31 = (np.array(shift, np.uint64) for shift in (30, 27, 31))
_STRIDES = np.arange(1, 65_537, dtype=np.uint64) * STRIDE  # of the first positions


def mix(values: Words) -> Words:
    """Scramble 64-bit integers, one to one."""
    return _mix_in_place(values.copy())


def _mix_in_place(values: Words) -> Words:
    values ^= values >> _S30
    values *= _V1
    values ^= values >> _S27
    values *= _V2
    values ^= values >> _S31
    return values


def unmix(value: int) -> int:
    """The inverse of `mix`, for one integer."""
    value ^= (value >> 31) ^ (value >> 62)
    value = (value * _I2) & _MASK
    value ^= (value >> 27) ^ (value >> 54)
    value = (value * _I1) & _MASK
    return value ^ (value >> 30) ^ (value >> 60)


def terms(tokens: Sequence[int] | npt.NDArray[np.int32], first: int = 0) -> Words:
    """What each token adds to the sum of its prefix; `first` is the position of tokens[0]."""
    values = np.asarray(tokens).astype(np.uint64)
    end = first + len(values)
    if end <= len(_STRIDES):
        values += _STRIDES[first:end]
    else:
        values += np.arange(first + 1, end + 1, dtype=np.uint64) * STRIDE
    return _mix_in_place(values)


def chain(
    tokens: Sequence[int] | npt.NDArray[np.int32],
    block_size: int,
    previous: int | None = None,
    first: int = 0,
) -> Words:
    """The hash of each full block, in order: shape (len(tokens) // block_size,).

    Token ids are from 0; block_size is in tokens. For the blocks that follow the one with hash
    `previous`, `first` is the position of tokens[0].
    """
    full = len(tokens) // block_size
    if not full:
        return np.empty(0, np.uint64)
    blocks = terms(tokens[: full * block_size], first).reshape(full, block_size)
    sums: Words = np.add.reduce(blocks, axis=1).cumsum()
    sums += np.uint64(1 if previous is None else unmix(previous))
    return _mix_in_place(sums)


def extend(previous: int | None, tokens: Sequence[int], first: int) -> int:
    """The hash of the block `tokens` that follows the block with hash `previous`.

    `first` is the position of tokens[0]; without a previous block it is 0.
    """
    total = 0 if previous is None else unmix(previous) - 1
    total += int(np.sum(terms(tokens, first), dtype=np.uint64)) + 1
    return int(mix(np.array([total & _MASK], np.uint64))[0])


def pack(hashes: Sequence[int] | Words) -> bytes:
    """Hashes as they cross the log: little-endian unsigned 64-bit."""
    return np.asarray(hashes, "<u8").tobytes()


def unpack(data: bytes) -> list[int]:
    """Inverse of `pack`; raises ValueError where the length is no multiple of 8."""
    if len(data) % 8:
        raise ValueError(f"block hashes: expected a multiple of 8 bytes, found {len(data)}")
    hashes: list[int] = np.frombuffer(data, "<u8").tolist()
    return hashes
