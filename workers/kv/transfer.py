"""Moving KV blocks between engines: the interface, and an implementation inside one process.

`nixl_transfer.py` is the real one; `MemoryTransfer` serves tests and single-process simulations,
and both pass the same tests. A fetch reads whole blocks of a peer's arena into blocks of the own
one and, when done, leaves a notice with the peer. Nothing here blocks, retries or knows requests:
the engine polls and decides.
"""

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

_CARD = struct.Struct("<QIIH")  # base address, block bytes, block count, length of the agent's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Blocks to read from a peer. With no blocks only the notice is left."""

    tag: int  # unique within the engine
    engine_id: str
    card: bytes  # the peer's `metadata()`
    remote_blocks: Sequence[int]
    local_blocks: Sequence[int]
    notice: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """How a fetch ended.

    `settled` is false for one that timed out: the local blocks may still be written to. A second
    end with `settled` true follows when they are safe.
    """

    tag: int
    error: str = ""
    settled: bool = True


@dataclass(slots=True)
class Polled:
    """What happened since the last poll."""

    ended: list[FetchEnd] = field(default_factory=list)
    notices: list[bytes] = field(default_factory=list)


class KvTransfer(Protocol):
    """Of one engine; not safe for threads."""

    def metadata(self) -> bytes:
        """What peers need to read from this arena, a few hundred bytes."""

    def fetch(self, fetch: Fetch) -> None:
        """Begin to read. Never raises; failure arrives as an end."""

    def poll(self) -> Polled:
        """Make progress, also for peers that read from here."""

    def forget(self, engine_id: str) -> None:
        """Drop a peer that is gone; its fetches fail."""

    def close(self) -> None:
        """Free everything; fetches in flight are abandoned."""


@dataclass(frozen=True, slots=True)
class Card:
    """The unpacked metadata of a peer."""

    base: int
    block_bytes: int
    block_count: int
    name: str
    agent: bytes

    def pack(self) -> bytes:
        name = self.name.encode()
        head = _CARD.pack(self.base, self.block_bytes, self.block_count, len(name))
        return head + name + self.agent

    @classmethod
    def unpack(cls, data: bytes) -> "Card":
        """Raises ValueError for anything that `pack` did not make."""
        try:
            base, block_bytes, block_count, name_bytes = _CARD.unpack_from(data)
        except struct.error as error:
            raise ValueError(
                f"KV metadata: expected {_CARD.size} bytes or more: {error}"
            ) from error
        end = _CARD.size + name_bytes
        return cls(base, block_bytes, block_count, data[_CARD.size : end].decode(), data[end:])


def checked_card(fetch: Fetch, block_bytes: int) -> Card:
    """The peer's card; raises ValueError when it cannot be what the fetch means."""
    card = Card.unpack(fetch.card)
    if card.name != fetch.engine_id:
        raise ValueError(f"KV metadata: expected engine {fetch.engine_id}, found {card.name}")
    if card.block_bytes != block_bytes:
        raise ValueError(f"KV blocks: expected {block_bytes} bytes, found {card.block_bytes}")
    if len(fetch.remote_blocks) != len(fetch.local_blocks):
        raise ValueError("KV blocks: expected as many remote as local ones")
    if any(not 0 <= block < card.block_count for block in fetch.remote_blocks):
        raise ValueError(f"KV blocks: expected ids below {card.block_count}")
    return card


def merged_runs(remote: Sequence[int], local: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(remote start, local start, length) of stretches that are contiguous on both sides."""
    start = 0
    for i in range(1, len(remote) + 1):
        joined = i < len(remote) and remote[i] == remote[i - 1] + 1 and local[i] == local[i - 1] + 1
        if not joined:
            yield remote[start], local[start], i - start
            start = i


class MemoryTransfer:
    """Copies between arenas of one process; tests hold fetches back or fail them."""

    peers: ClassVar[dict[str, "MemoryTransfer"]] = {}  # the network

    def __init__(self, engine_id: str, arena: Any) -> None:
        self.engine_id = engine_id
        self.stalled = False
        self.failing = 0  # how many fetches will fail
        self.arena: np.ndarray[Any, Any] = arena
        self._fetches: list[tuple[Fetch, float]] = []  # with the time at which they are late
        self._late: set[int] = set()
        self.notices: list[bytes] = []
        self.peers[engine_id] = self

    def metadata(self) -> bytes:
        return Card(0, self.arena[0].nbytes, len(self.arena), self.engine_id, b"").pack()

    def fetch(self, fetch: Fetch) -> None:
        self._fetches.append((fetch, time.monotonic() + fetch.timeout_s))

    def poll(self) -> Polled:
        polled = Polled(notices=self.notices)
        self.notices = []
        if self.stalled:
            now_s = time.monotonic()
            late = {fetch.tag for fetch, ends_at_s in self._fetches if now_s >= ends_at_s}
            polled.ended = [FetchEnd(tag, "late", settled=False) for tag in late - self._late]
            self._late |= late
        else:
            fetches, self._fetches = self._fetches, []
            polled.ended = [FetchEnd(fetch.tag, self._copied(fetch)) for fetch, _ in fetches]
            self._late.clear()
        return polled

    def forget(self, engine_id: str) -> None:
        """Nothing is kept of a peer."""

    def close(self) -> None:
        self.peers.pop(self.engine_id, None)

    def _copied(self, fetch: Fetch) -> str:
        try:
            checked_card(fetch, self.arena[0].nbytes)
        except ValueError as error:
            return str(error)
        peer = self.peers.get(fetch.engine_id)
        if peer is None or self.failing:
            self.failing = max(0, self.failing - 1)
            return f"engine {fetch.engine_id} is gone"
        for remote, local, count in merged_runs(fetch.remote_blocks, fetch.local_blocks):
            self.arena[local : local + count] = peer.arena[remote : remote + count]
        peer.notices.append(fetch.notice)
        return ""
