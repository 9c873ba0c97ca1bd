"""Moves KV blocks between engines: the interface, and an implementation inside one process.

`nixl_transfer.py` has the real implementation. `MemoryTransfer` is for engines that share a
process; both pass the same tests. A move reads whole blocks of a peer's arena into blocks of the
own arena, or writes them there. When it is done, the peer receives a notice. The two engines may
differ in tensor parallelism (`layout.py`). A transfer does not block, does not retry, and has no
notion of requests: the engine polls and decides.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import numpy as np

from workers.kv.layout import Card, card_of, spans


class Direction(StrEnum):
    """The direction of a move; the values are NIXL's operations."""

    READ = "READ"
    WRITE = "WRITE"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """Blocks to read from a peer, or to write there.

    Without blocks, it only sends the notice; if that is empty too, it only connects.
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
    """The end of a move.

    `settled` is false if the move timed out: the blocks may still be read or written. A second end
    with `settled` true follows when they are safe; its `error` is empty if the move succeeded.
    """

    tag: int
    error: str = ""
    settled: bool = True


@dataclass(slots=True)
class PollResult:
    """The ends and notices since the last poll."""

    ends: list[MoveEnd] = field(default_factory=list)
    notices: list[bytes] = field(default_factory=list)


class KvTransfer(Protocol):
    """Moves KV blocks for one engine; not thread-safe."""

    def metadata(self) -> bytes:
        """Return the card that peers need to reach this arena, a few hundred bytes."""

    def move(self, move: BlockMove) -> None:
        """Start a move. Never raises: `poll` reports a failure as an end."""

    def poll(self) -> PollResult:
        """Make progress, also for peers' moves, and return ends and notices."""

    def forget(self, engine_id: str) -> None:
        """Drop a peer that is gone; moves with it fail."""

    def close(self) -> None:
        """Free all resources; moves in flight are abandoned."""


def checked_card(move: BlockMove, ours: Card) -> Card:
    """Return the peer's card; raises ValueError if it does not fit the move."""
    card = Card.unpack(move.card)
    card.check(move.engine_id, ours)
    if len(move.remote_blocks) != len(move.local_blocks):
        raise ValueError("KV blocks: expected as many remote as local ones")
    if any(not 0 <= block < card.block_count for block in move.remote_blocks):
        raise ValueError(f"KV blocks: expected ids below {card.block_count}")
    return card


class NoTransfer:
    """A transfer for engines without one: every move fails."""

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
        """Do nothing: there is nothing to free."""


class MemoryTransfer:
    """Copies between arenas of one process; `poll` makes the moves."""

    peers: ClassVar[dict[str, "MemoryTransfer"]] = {}  # the network

    def __init__(self, engine_id: str, regions: "np.ndarray[Any, Any]") -> None:
        self.engine_id = engine_id
        self.regions = regions
        self.card = card_of(regions, engine_id, b"")
        self.moves: list[BlockMove] = []  # for the next `poll`
        self.notices: list[bytes] = []  # from peers
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
        """Do nothing: there is no state of a peer."""

    def close(self) -> None:
        self.peers.pop(self.engine_id, None)

    def make(self, move: BlockMove) -> str:
        """Copy the blocks and send the notice; return an error message, or ""."""
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
