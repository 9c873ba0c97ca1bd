"""From KV events of vLLM to canonical hashes; what an engine sends is in `test_engine.py`."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from zmq.asyncio import Socket
from zmq.constants import SocketType
from zmq.sugar.context import Context
from zmq.sugar.socket import SyncSocket

from schemas.prefix import chain, salt_of
from workers.kv.block_log import BlockLog
from workers.llm.vllm.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Translation,
    subscribe,
)

SIZE = 16


class Cache:
    """A translation and its log, fed with messages in order."""

    def __init__(self, blocks_max: int = 100) -> None:
        self.log = BlockLog(SIZE, blocks_max)
        self.translation = Translation(self.log, blocks_max)
        self.number = 0

    def tell(self, *events: Event) -> None:
        self.translation.apply(self.number, events)
        self.number += 1

    def block_hashes(self) -> set[int]:
        return set(self.log.snapshot())


def prompt(tokens: int, salt: int = 0) -> list[int]:
    return [10 + (salt * 131 + i * 7) % 400 for i in range(tokens)]


def names(tokens: Sequence[int]) -> list[int]:
    """Stand-ins for vLLM's hashes: they depend on the whole prefix, too."""
    return [hash(tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]


def stored(tokens: Sequence[int], first: int = 0, **changes: Any) -> BlockStored:
    """The blocks of a prompt from block `first` on."""
    hashes = names(tokens)
    fields: dict[str, Any] = {
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": list(tokens[first * SIZE : len(hashes) * SIZE]),
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
    }
    return BlockStored(**{**fields, **changes})


def expected(tokens: Sequence[int]) -> set[int]:
    return set(chain(tokens, SIZE).tolist())


def test_translation_gives_blocks_canonical_hashes() -> None:
    cache, tokens = Cache(), prompt(70)
    cache.tell(stored(tokens[:40]))
    cache.tell(stored(tokens, first=2))
    assert cache.block_hashes() == expected(tokens)
    assert cache.log.snapshot() == chain(tokens, SIZE).tolist()


def test_translation_salts_hashes_by_scope() -> None:
    """vLLM reports the salt with the first block of a prompt."""
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens[:32], extra_keys=[("ada",), None]), stored(tokens, first=2))
    assert cache.log.snapshot() == chain(tokens, SIZE, salt_of("ada")).tolist()
    for extra_keys in ([(("image", 0),), None], [("ada", "x"), None], [None, ("ada",)]):
        other_cache = Cache()
        other_cache.tell(stored(tokens[:32], extra_keys=extra_keys))
        assert not other_cache.block_hashes(), "what is no plain text has no name"


def test_translation_salts_hashes_of_adapters_by_scope() -> None:
    """Each block of an adapter has its name as the first key."""
    fields: dict[str, Any] = {"lora_id": 1, "lora_name": "ada"}
    cache, tokens = Cache(), prompt(64)
    keys = [("ada", "scope"), ("ada",)]
    cache.tell(stored(tokens[:32], extra_keys=keys, **fields))
    cache.tell(stored(tokens, first=2, extra_keys=[("ada",), ("ada",)], **fields))
    assert cache.log.snapshot() == chain(tokens, SIZE, salt_of("scope")).tolist()
    odd_places = [("ada",), ("ada",)], [("bob", "x"), ("ada",)], None, [("ada", "x"), ("ada", "x")]
    for odd_keys in odd_places:
        other_cache = Cache()
        other_cache.tell(stored(tokens[:32], extra_keys=odd_keys, **fields))
        assert not other_cache.block_hashes(), odd_keys


def test_translation_removes_and_clears_blocks() -> None:
    cache, tokens, other_tokens = Cache(), prompt(64), prompt(64, salt=1)
    cache.tell(stored(tokens), stored(other_tokens))
    cache.tell(BlockRemoved(names(tokens)[2:], "GPU", 0))
    assert cache.block_hashes() == expected(tokens[:32]) | expected(other_tokens)
    cache.tell(AllBlocksCleared())
    assert cache.block_hashes() == set()


def test_block_stays_until_removal_of_last_copy() -> None:
    cache, tokens = Cache(), prompt(32)
    cache.tell(stored(tokens), stored(tokens))
    cache.tell(BlockRemoved(names(tokens)))
    assert cache.block_hashes() == expected(tokens)
    cache.tell(BlockRemoved(names(tokens)))
    assert cache.block_hashes() == set()


def test_block_may_follow_removed_block() -> None:
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens[:32]), BlockRemoved(names(tokens)[:2]))
    cache.tell(stored(tokens, first=2))
    assert cache.block_hashes() == set(chain(tokens, SIZE).tolist()[2:])


def test_translation_skips_block_after_unknown_parent() -> None:
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens, first=2))
    assert cache.block_hashes() == set()


@pytest.mark.parametrize("number", [0, 5])
def test_event_gap_clears_earlier_blocks(number: int) -> None:
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens[:32]))
    cache.number = number
    cache.tell(stored(tokens, first=2))
    assert cache.translation.gaps == 1
    assert cache.block_hashes() == set(chain(tokens, SIZE).tolist()[2:])


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_id": 1},
        {"extra_keys": [["salt", "more"], None]},
        {"medium": "CPU"},
        {"group_idx": 1},
        {"block_size": 8},
        {"token_ids": [1, 2]},
    ],
)
def test_translation_skips_other_kinds_of_blocks(changes: dict[str, Any]) -> None:
    cache = Cache()
    cache.tell(stored(prompt(32), **changes))
    assert cache.block_hashes() == set()


def test_translation_bounds_cached_hashes() -> None:
    cache = Cache(blocks_max=3)
    for salt in range(6):
        cache.tell(stored(prompt(32, salt)))
    assert len(cache.block_hashes()) == 3
    assert len(cache.translation._cached_blocks) == len(cache.translation._evicted_blocks) == 3


async def test_subscription_closes_sockets_after_early_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Socket.connect

    def connected(self: Socket, address: str) -> None:
        connect(self, address)
        if self.type == SocketType.SUB:
            monitor = SyncSocket.shadow(self.get_monitor_socket().underlying)
            assert monitor.poll(timeout=60_000), "no handshake"

    monkeypatch.setattr(Socket, "connect", connected)
    folder = tmp_path / "kv"
    folder.mkdir()
    with Context() as context, context.socket(SocketType.PUB) as publisher:
        publisher.bind(f"ipc://{folder}/socket")
        events = await subscribe(f"ipc://{folder}/socket", BlockLog(SIZE, 100), 100)
        gc.collect()
        await events.close()
