"""Follows the contents of vLLM's prefix cache by its KV events, as hashes of `schemas/prefix.py`.

vLLM's engine process publishes stored and removed blocks over ZeroMQ, with hashes of its own.
Trivium's hash of a stored block is computed from its tokens and its parent, so parents are
remembered by vLLM's hashes, those of removed blocks for a while too. A lost message may have
reported removals, so the log is then cleared, and fills again from later events. It never contains
a block that is not in the cache; it may miss some. Used by `engine.py`.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree

import msgspec
from zmq.asyncio import Context
from zmq.constants import Event as SocketEvent
from zmq.constants import SocketOption, SocketType

from schemas.prefix import extend, salt_of
from workers.kv.block_log import BlockLog

_CONNECT_S = 30.0
_MESSAGES_MAX = 10_000  # messages that wait here; ZeroMQ drops further ones, which is a gap
Name = int | bytes  # vLLM's hash of a block
log = logging.getLogger(__name__)


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that a request filled or found; the fields of vLLM's event that are used."""

    block_hashes: Sequence[Name]
    parent_block_hash: Name | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that vLLM evicted from its prefix cache."""

    block_hashes: Sequence[Name]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventMessage(msgspec.Struct, array_like=True):
    """One message of vLLM's KV event stream."""

    ts: float
    events: list[Event]


class Translation:
    """Translates vLLM's events for a block log; it remembers at most 2 `blocks_max` names."""

    def __init__(self, block_log: BlockLog, blocks_max: int) -> None:
        self._log, self._blocks_max = block_log, blocks_max
        self._next = 0
        self._cached_blocks: dict[
            Name, tuple[int, int]
        ] = {}  # Trivium's hash, and the position of its end
        self._evicted_blocks: dict[
            Name, tuple[int, int]
        ] = {}  # a stored block may follow an evicted one
        self._copies: Counter[Name] = Counter()  # further copies of cached blocks
        self.gaps = 0

    def apply(self, number: int, events: Sequence[Event]) -> None:
        """Apply one message; numbers count from 0, and a gap means that messages were lost."""
        if number != self._next:
            self.gaps += 1
            log.warning("KV events: expected message %d, found %d", self._next, number)
            self._clear()
        self._next = number + 1
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._clear()

    def _store(self, event: BlockStored) -> None:
        size, salt = event.block_size, _salt_of(event)
        is_whole = len(event.token_ids) == size * len(event.block_hashes)
        is_usable = is_whole and size == self._log.block_size and _is_ours(event)
        if salt is None or not is_usable:
            return
        previous, position = salt, 0
        if event.parent_block_hash is not None:
            parent = event.parent_block_hash
            parent_block = self._cached_blocks.get(parent) or self._evicted_blocks.get(parent)
            if parent_block is None:
                return
            previous, position = parent_block
        for number, name in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            previous = extend(previous, tokens, position)
            position += size
            self._evicted_blocks.pop(name, None)
            if name in self._cached_blocks:
                self._copies[name] += 1  # each of two requests at once filled such a block
            self._cached_blocks[name] = previous, position
            self._log.add((previous,))
        while len(self._cached_blocks) > self._blocks_max:
            self._retire(next(iter(self._cached_blocks)))

    def _remove(self, event: BlockRemoved) -> None:
        if _is_ours(event):
            for name in event.block_hashes:
                if self._copies[name] > 0:
                    self._copies[name] -= 1
                elif name in self._cached_blocks:
                    self._retire(name)

    def _retire(self, name: Name) -> None:
        block = self._cached_blocks.pop(name)
        del self._copies[name]
        self._log.discard((block[0],))
        self._evicted_blocks[name] = block
        if len(self._evicted_blocks) > self._blocks_max:
            del self._evicted_blocks[next(iter(self._evicted_blocks))]

    def _clear(self) -> None:
        self._evicted_blocks |= self._cached_blocks
        self._cached_blocks.clear()
        self._copies.clear()
        while len(self._evicted_blocks) > self._blocks_max:
            del self._evicted_blocks[next(iter(self._evicted_blocks))]
        self._log.clear()


def _salt_of(event: BlockStored) -> int | None:
    """Return the salt of the scope that shares the blocks; None for blocks that are not text, and
    for those of an adapter without a scope, whose hashes would be those of the model's blocks.

    vLLM calls the scope their cache salt, and sends it with the first block of a prompt. The keys
    of each block of an adapter begin with its name.
    """
    adapter, keys = event.lora_name, [tuple(block or ()) for block in event.extra_keys or ((),)]
    if event.lora_id is not None:
        if adapter is None or any(block[:1] != (adapter,) for block in keys):
            return None
        keys = [block[1:] for block in keys]
    first, *rest = keys
    is_first = event.parent_block_hash is None
    if any(rest) or (is_first and not first and adapter is not None):
        return None
    if not first:
        return 0
    is_salted = is_first and len(first) == 1 and isinstance(first[0], str)
    return salt_of(str(first[0])) if is_salted else None


def _is_ours(event: BlockStored | BlockRemoved) -> bool:
    """Return whether the blocks are in the engine's own memory, and in the first group of layers.

    Models with several kinds of layers have more groups.
    """
    return event.medium in (None, "GPU") and not event.group_idx


class EventSubscription:
    """A subscription to one engine's events; `subscribe` creates it."""

    def __init__(self, folder: Path, translation: Translation) -> None:
        self._folder, self._translation = folder, translation
        self._context = Context()
        self._socket = self._context.socket(SocketType.SUB)
        self._reading: asyncio.Task[None] | None = None

    async def open(self, endpoint: str) -> None:
        """Connect; return when messages arrive. Raises TimeoutError after `_CONNECT_S`."""
        self._socket.setsockopt(SocketOption.RCVHWM, _MESSAGES_MAX)
        self._socket.subscribe(b"")
        monitor = self._socket.get_monitor_socket(SocketEvent.HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await monitor.recv_multipart()
        finally:
            self._socket.disable_monitor()
            monitor.close(linger=0)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        """Stop reading, and remove the endpoint's folder."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        self._context.destroy(linger=0)
        rmtree(self._folder, ignore_errors=True)

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(EventMessage)
        while True:
            _, number, payload = await self._socket.recv_multipart()
            try:
                batch = decoder.decode(payload)
            except msgspec.MsgspecError as error:  # its missing number then counts as a gap
                log.warning("KV events: unreadable: %s", error)
                continue
            self._translation.apply(int.from_bytes(number, "big"), batch.events)


async def subscribe(endpoint: str, block_log: BlockLog, blocks_max: int) -> EventSubscription:
    """Follow the engine that publishes at `endpoint`: ipc:// in a folder that `close` removes."""
    folder = Path(endpoint.removeprefix("ipc://")).parent
    events = EventSubscription(folder, Translation(block_log, blocks_max))
    try:
        await events.open(endpoint)
    except BaseException:
        await events.close()
        raise
    return events
