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

    def held(self) -> set[int]:
        return set(self.log.snapshot())


def prompt(tokens: int, salt: int = 0) -> list[int]:
    return [10 + (salt * 131 + i * 7) % 400 for i in range(tokens)]


def names(tokens: Sequence[int]) -> list[int]:
    """Stand-ins for vLLM's hashes: they depend on the whole prefix, too."""
    return [hash(tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]


def stored(tokens: Sequence[int], first: int = 0, **changes: Any) -> BlockStored:
    """The blocks of a prompt from block `first` on."""
    known = names(tokens)
    fields: dict[str, Any] = {
        "block_hashes": known[first:],
        "parent_block_hash": known[first - 1] if first else None,
        "token_ids": list(tokens[first * SIZE : len(known) * SIZE]),
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
    }
    return BlockStored(**{**fields, **changes})


def expected(tokens: Sequence[int]) -> set[int]:
    return set(chain(tokens, SIZE).tolist())


def test_blocks_get_the_names_that_routers_compute() -> None:
    cache, tokens = Cache(), prompt(70)
    cache.tell(stored(tokens[:40]))
    cache.tell(stored(tokens, first=2))
    assert cache.held() == expected(tokens)
    assert cache.log.snapshot() == chain(tokens, SIZE).tolist()


def test_blocks_of_a_scope_get_its_names() -> None:
    """vLLM tells its salt beside a prompt's first block."""
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens[:32], extra_keys=[("ada",), None]), stored(tokens, first=2))
    assert cache.log.snapshot() == chain(tokens, SIZE, salt_of("ada")).tolist()
    for extra_keys in ([(("image", 0),), None], [("ada", "x"), None], [None, ("ada",)]):
        other = Cache()
        other.tell(stored(tokens[:32], extra_keys=extra_keys))
        assert not other.held(), "what is no plain text has no name"


def test_removed_and_cleared_blocks_are_gone() -> None:
    cache, tokens, other = Cache(), prompt(64), prompt(64, salt=1)
    cache.tell(stored(tokens), stored(other))
    cache.tell(BlockRemoved(names(tokens)[2:], "GPU", 0))
    assert cache.held() == expected(tokens[:32]) | expected(other)
    cache.tell(AllBlocksCleared())
    assert cache.held() == set()


def test_a_block_is_there_until_its_last_copy_went() -> None:
    cache, tokens = Cache(), prompt(32)
    cache.tell(stored(tokens), stored(tokens))
    cache.tell(BlockRemoved(names(tokens)))
    assert cache.held() == expected(tokens)
    cache.tell(BlockRemoved(names(tokens)))
    assert cache.held() == set()


def test_a_block_may_follow_one_that_is_gone() -> None:
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens[:32]), BlockRemoved(names(tokens)[:2]))
    cache.tell(stored(tokens, first=2))
    assert cache.held() == set(chain(tokens, SIZE).tolist()[2:])


def test_a_block_that_follows_an_unknown_one_is_not_told() -> None:
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens, first=2))
    assert cache.held() == set()


@pytest.mark.parametrize("number", [0, 5])
def test_after_a_gap_nothing_is_claimed_that_may_be_gone(number: int) -> None:
    cache, tokens = Cache(), prompt(64)
    cache.tell(stored(tokens[:32]))
    cache.number = number
    cache.tell(stored(tokens, first=2))
    assert cache.translation.gaps == 1
    assert cache.held() == set(chain(tokens, SIZE).tolist()[2:])


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
def test_blocks_of_another_kind_are_not_told(changes: dict[str, Any]) -> None:
    cache = Cache()
    cache.tell(stored(prompt(32), **changes))
    assert cache.held() == set()


def test_names_are_bounded() -> None:
    cache = Cache(blocks_max=3)
    for salt in range(6):
        cache.tell(stored(prompt(32, salt)))
    assert len(cache.held()) == 3
    assert len(cache.translation._cached_blocks) == len(cache.translation._evicted_blocks) == 3


async def test_a_handshake_before_anybody_waits_leaves_no_open_socket(
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
