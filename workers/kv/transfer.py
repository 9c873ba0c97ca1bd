"""Moving KV blocks between engines: the interface, and an implementation inside one process.

`nixl_transfer.py` has the real implementation. `MemoryTransfer` is for engines that share a
process; both pass the same tests. A move reads whole blocks of a peer's arena into blocks of the
own arena, or writes them there, and leaves a notice with the peer when it is done. The two engines
may differ in tensor parallelism (`layout.py`). Nothing here blocks, retries or knows requests: the
engine polls and decides.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import numpy as np

from workers.kv.layout import Card, card_of, spans


class Direction(StrEnum):
    """Which way the bytes go; the values are NIXL's words."""

    READ = "READ"
    WRITE = "WRITE"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """Blocks to read from a peer, or to write there.

    With no blocks only the notice is left; with an empty notice too, it only connects.
    """

    tag: int  # unique within the engine
    engine_id: str
    card: bytes  # the peer's `metadata()`
    direction: Direction = Direction.READ
    remote_blocks: Sequence[int] = ()
    local_blocks: Sequence[int] = ()
    notice: bytes = b""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MoveEnd:
    """How a move ended.

    `settled` is false for one that timed out: the blocks may still be read or written. A second end
    with `settled` true follows when they are safe; its `error` is empty if the move was made.
    """

    tag: int
    error: str = ""
    settled: bool = True


@dataclass(slots=True)
class PollResult:
    """What happened since the last poll."""

    ends: list[MoveEnd] = field(default_factory=list)
    notices: list[bytes] = field(default_factory=list)


class KvTransfer(Protocol):
    """Moves KV blocks for one engine; not safe for threads."""

    def metadata(self) -> bytes:
        """The card that peers need to reach this arena, a few hundred bytes."""

    def move(self, move: BlockMove) -> None:
        """Begin. Never raises; failure arrives as an end."""

    def poll(self) -> PollResult:
        """Make progress, also for peers that read and write here."""

    def forget(self, engine_id: str) -> None:
        """Drop a peer that is gone; its moves fail."""

    def close(self) -> None:
        """Free everything; moves in flight are abandoned."""


def checked_card(move: BlockMove, ours: Card) -> Card:
    """The peer's card; raises ValueError when it cannot be what the move means."""
    card = Card.unpack(move.card)
    card.check(move.engine_id, ours)
    if len(move.remote_blocks) != len(move.local_blocks):
        raise ValueError("KV blocks: expected as many remote as local ones")
    if any(not 0 <= block < card.block_count for block in move.remote_blocks):
        raise ValueError(f"KV blocks: expected ids below {card.block_count}")
    return card


class NoTransfer:
    """The transfer of an engine that has none: every move fails."""

    def __init__(self) -> None:
        self._ends: list[MoveEnd] = []

    def metadata(self) -> bytes:
        return b""

    def move(self, move: BlockMove) -> None:
        self._ends.append(MoveEnd(move.tag, "this engine has no KV transfer"))

    def poll(self) -> PollResult:
        polled, self._ends = PollResult(self._ends), []
        return polled

    def forget(self, engine_id: str) -> None:
        """Do nothing: there are no peers to drop."""

    def close(self) -> None:
        """There is nothing to free."""


class MemoryTransfer:
    """Copies between arenas of one process; a move is made when its engine polls."""

    peers: ClassVar[dict[str, "MemoryTransfer"]] = {}  # the network

    def __init__(self, engine_id: str, regions: "np.ndarray[Any, Any]") -> None:
        self.engine_id = engine_id
        self.regions = regions
        self.card = card_of(regions, engine_id, b"")
        self.moves: list[BlockMove] = []  # to be made
        self.notices: list[bytes] = []  # that peers have left
        self.peers[engine_id] = self

    def metadata(self) -> bytes:
        return self.card.pack()

    def move(self, move: BlockMove) -> None:
        self.moves.append(move)

    def poll(self) -> PollResult:
        moves, self.moves = self.moves, []
        notices, self.notices = self.notices, []
        return PollResult([MoveEnd(move.tag, self.make(move)) for move in moves], notices)

    def forget(self, engine_id: str) -> None:
        """Do nothing: no state is kept of a peer."""

    def close(self) -> None:
        self.peers.pop(self.engine_id, None)

    def make(self, move: BlockMove) -> str:
        """Copy the blocks and leave the notice; returns why not, or ""."""
        try:
            peer_card = checked_card(move, self.card)
        except ValueError as error:
            return str(error)
        peer = self.peers.get(move.engine_id)
        if peer is None:
            return f"engine {move.engine_id} is gone"
        for our, their, count in spans(self.card, move.local_blocks, peer_card, move.remote_blocks):
            to, source = (our, their) if move.direction is Direction.READ else (their, our)
            ctypes.memmove(to, source, count)
        if move.notice:
            peer.notices.append(move.notice)
        return ""
