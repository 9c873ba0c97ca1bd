"""The memory layout of a KV arena, and which bytes of two arenas correspond.

A block consists of its KV heads in order. With tensor parallelism every rank has a region of its
own, with its share of the heads of every block. Between engines of different degrees a block moves
in pieces, one for each share of the engine with more ranks. The pieces are contiguous on one side
and scattered on the other. Pure; `transfer.py` and `nixl_transfer.py` move the bytes.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_HEAD = struct.Struct("<IIHH")  # block bytes, block count, regions, length of the agent's name


@dataclass(frozen=True, slots=True)
class PieceRow:
    """One piece of every block: that of block i is at `address + i * stride`, `length` bytes."""

    address: int
    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Card:
    """An arena as peers need it: its regions, one per rank, and the metadata of its agent.

    `block_bytes` counts a whole block, over all ranks.
    """

    regions: Sequence[int]  # addresses
    block_bytes: int
    block_count: int
    name: str
    agent: bytes

    def pack(self) -> bytes:
        """Return the bytes that `unpack` reads; engines publish them as
        `Capability.nixl_metadata`."""
        name = self.name.encode()
        head = _HEAD.pack(self.block_bytes, self.block_count, len(self.regions), len(name))
        return head + struct.pack(f"<{len(self.regions)}Q", *self.regions) + name + self.agent

    @classmethod
    def unpack(cls, data: bytes) -> "Card":
        """Read a card from bytes; raises ValueError if `pack` did not make them."""
        try:
            block_bytes, block_count, count, name_bytes = _HEAD.unpack_from(data)
            regions = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
        except struct.error as error:
            raise ValueError(
                f"KV metadata: expected {_HEAD.size} bytes or more: {error}"
            ) from error
        start = _HEAD.size + 8 * count
        end = start + name_bytes
        return cls(regions, block_bytes, block_count, data[start:end].decode(), data[end:])

    def rows(self, pieces: int) -> list[PieceRow]:
        """Return the pieces of a block, in the order of its heads; at least one per region."""
        in_region = pieces // len(self.regions)
        length, stride = self.block_bytes // pieces, self.block_bytes // len(self.regions)
        return [
            PieceRow(address + i * length, length, stride)
            for address in self.regions
            for i in range(in_region)
        ]

    def check(self, engine_id: str, ours: "Card") -> None:
        """Raise ValueError if this cannot be the engine's card, or its blocks do not fit ours."""
        if self.name != engine_id:
            raise ValueError(f"KV metadata: expected engine {engine_id}, found {self.name}")
        if self.block_bytes != ours.block_bytes:
            raise ValueError(
                f"KV blocks: expected {ours.block_bytes} bytes, found {self.block_bytes}"
            )
        degrees = sorted((len(self.regions), len(ours.regions)))
        if not degrees[0] or degrees[1] % degrees[0] or self.block_bytes % degrees[1]:
            raise ValueError(
                f"KV layout: expected tensor parallelism that fits {len(ours.regions)}, "
                f"found {len(self.regions)}"
            )


def card_of(regions: "np.ndarray[Any, Any]", name: str, agent: bytes) -> Card:
    """Return the card of an arena of shape (ranks, blocks, words of a rank's share of a block)."""
    ranks, block_count, _ = regions.shape
    addresses = [int(region.ctypes.data) for region in regions]
    return Card(addresses, regions[:, 0].nbytes, block_count, name, agent)


def pieces_of(ours: Card, peer: Card) -> int:
    """Return the number of pieces in which a block moves between these two arenas."""
    return max(len(ours.regions), len(peer.regions))


def elements(blocks: Sequence[int], pieces: int, block_count: int) -> "np.ndarray[Any, Any]":
    """Return the positions of the blocks' pieces in a list of `pieces` rows of `block_count`.

    They are int32, row by row, `pieces` times as many as there are blocks.
    """
    rows = np.arange(pieces, dtype=np.int32)[:, None] * np.int32(block_count)
    numbers: np.ndarray[Any, Any] = (rows + np.asarray(blocks, np.int32)).ravel()
    return numbers


def in_order(local: Sequence[int], remote: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the pairs of blocks in ascending order, so that neighbours can be merged.

    Raises ValueError if one side has more blocks.
    """
    pairs = sorted(zip(local, remote, strict=True))
    return [local_block for local_block, _ in pairs], [remote_block for _, remote_block in pairs]


def spans(
    ours: Card, local: Sequence[int], peer: Card, remote: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (our address, their address, bytes) of each copy; contiguous blocks are merged."""
    local, remote = in_order(local, remote)
    pieces = pieces_of(ours, peer)
    for our, their in zip(ours.rows(pieces), peer.rows(pieces), strict=True):
        ends: tuple[int, int] | None = None
        start = (0, 0, 0)
        for ours_at, theirs_at in zip(local, remote, strict=True):
            at = our.address + ours_at * our.stride, their.address + theirs_at * their.stride
            if at == ends:
                start = (start[0], start[1], start[2] + our.length)
            else:
                if ends is not None:
                    yield start
                start = (*at, our.length)
            ends = at[0] + our.length, at[1] + our.length
        if ends is not None:
            yield start
