"""KV transfers: one suite for NIXL and the one in memory, then NIXL between real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.waiting import run, until
from workers.kv.nixl_transfer import NixlTransfer
from workers.kv.transfer import (
    Card,
    Fetch,
    FetchEnd,
    KvTransfer,
    MemoryTransfer,
    Polled,
    merged_runs,
)

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs the package nixl")

BLOCKS, WORDS = 64, 128
Made = tuple[KvTransfer, Any]
KINDS: dict[str, Callable[[str, Any], KvTransfer]] = {
    "memory": MemoryTransfer,
    "nixl": NixlTransfer,
}


def arena_of(first: int) -> Any:
    """An arena whose blocks hold different words."""
    return np.arange(first, first + BLOCKS * WORDS, dtype=np.uint64).reshape(BLOCKS, WORDS)


def fetch_of(peer: str, card: bytes, blocks: list[int], local: list[int], tag: int = 1) -> Fetch:
    return Fetch(
        tag=tag,
        engine_id=peer,
        card=card,
        remote_blocks=blocks,
        local_blocks=local,
        notice=b"done",
        timeout_s=10,
    )


async def ends_of(*transfers: KvTransfer, notices: int = 0, ends: int = 1) -> Polled:
    """Poll until so many fetches ended and notices came, on whichever side."""
    total = Polled()

    def enough() -> bool:
        for transfer in transfers:
            polled = transfer.poll()
            total.ended += polled.ended
            total.notices += polled.notices
        return len(total.ended) >= ends and len(total.notices) >= notices

    await until(enough)
    return total


@pytest.fixture(params=["memory", pytest.param("nixl", marks=needs_nixl)])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Made, Made]]:
    kind = KINDS[request.param]
    ours, theirs = np.zeros((BLOCKS, WORDS), np.uint64), arena_of(1_000)
    made = ((kind("reader", ours), ours), (kind("holder", theirs), theirs))
    yield made
    for transfer, _ in made:
        transfer.close()


def test_blocks_arrive_where_they_should(pair: tuple[Made, Made]) -> None:
    (reader, ours), (holder, theirs) = pair
    remote, local = [3, 4, 5, 9, 20, 21], [7, 8, 9, 1, 30, 40]
    reader.fetch(fetch_of("holder", holder.metadata(), remote, local))
    polled = run(ends_of(reader, holder, notices=1))
    assert polled.ended == [FetchEnd(1)]
    assert polled.notices == [b"done"]
    assert (ours[local] == theirs[remote]).all()
    assert np.count_nonzero(ours.any(axis=1)) == len(local)  # nothing else was touched


def test_notice_alone_needs_no_blocks(pair: tuple[Made, Made]) -> None:
    (reader, ours), (holder, _) = pair
    reader.fetch(fetch_of("holder", holder.metadata(), [], []))
    polled = run(ends_of(reader, holder, notices=1))
    assert polled.ended == [FetchEnd(1)]
    assert not ours.any()


def test_many_fetches_at_once(pair: tuple[Made, Made]) -> None:
    (reader, ours), (holder, theirs) = pair
    for tag in range(20):
        reader.fetch(fetch_of("holder", holder.metadata(), [tag * 2], [63 - tag], tag))
    polled = run(ends_of(reader, holder, notices=20, ends=20))
    assert sorted(end.tag for end in polled.ended) == list(range(20))
    assert not any(end.error for end in polled.ended)
    assert (ours[63 - np.arange(20)] == theirs[np.arange(20) * 2]).all()


@pytest.mark.parametrize(
    ("peer", "card", "blocks", "error"),
    [
        ("holder", b"", [1], "expected 18 bytes or more"),
        ("another", None, [1], "expected engine another, found holder"),
        ("holder", None, [BLOCKS], "expected ids below 64"),
        ("holder", None, [-1], "expected ids below 64"),
        ("holder", None, [1, 2], "as many remote as local"),
    ],
)
def test_what_cannot_be_read_ends_with_an_error(
    pair: tuple[Made, Made], peer: str, card: bytes | None, blocks: list[int], error: str
) -> None:
    (reader, _), (holder, _) = pair
    found = holder.metadata() if card is None else card
    reader.fetch(fetch_of(peer, found, blocks, [1]))
    (end,) = run(ends_of(reader)).ended
    assert error in end.error
    assert end.settled


def test_blocks_of_another_size_are_not_read(pair: tuple[Made, Made]) -> None:
    (reader, _), _ = pair
    card = Card(0, 8, BLOCKS, "holder", b"").pack()
    reader.fetch(fetch_of("holder", card, [1], [1]))
    (end,) = run(ends_of(reader)).ended
    assert "expected 1024 bytes, found 8" in end.error


def test_metadata_is_small(pair: tuple[Made, Made]) -> None:
    (_, _), (holder, _) = pair
    assert len(holder.metadata()) < 2_000


@pytest.mark.parametrize(
    ("remote", "local", "expected"),
    [
        ([], [], []),
        ([5], [2], [(5, 2, 1)]),
        ([1, 2, 3], [4, 5, 6], [(1, 4, 3)]),
        ([1, 2, 3], [4, 6, 7], [(1, 4, 1), (2, 6, 2)]),
        ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
    ],
)
def test_stretches_merge_where_both_sides_go_on(
    remote: list[int], local: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert list(merged_runs(remote, local)) == expected


HOLDER = """
import sys, time
import numpy as np
from workers.kv.nixl_transfer import NixlTransfer
arena = np.arange(1000, 1000 + 64 * 128, dtype=np.uint64).reshape(64, 128)
transfer = NixlTransfer(sys.argv[1], arena)
print(transfer.metadata().hex(), flush=True)
ends_at = time.monotonic() + 40
while time.monotonic() < ends_at:
    for notice in transfer.poll().notices:
        print(notice.decode(), flush=True)
    time.sleep(0.002)
"""


@pytest.fixture
def holders() -> Iterator[Callable[[str], tuple["subprocess.Popen[str]", bytes]]]:
    """Starts processes that hold an arena and only poll."""
    started: list[subprocess.Popen[str]] = []

    def start(engine_id: str) -> tuple["subprocess.Popen[str]", bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, engine_id], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, bytes.fromhex(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@needs_nixl
def test_another_process_is_read(holders: Callable[[str], Any]) -> None:
    process, card = holders("holder")
    ours = np.zeros((BLOCKS, WORDS), np.uint64)
    reader = NixlTransfer("reader", ours)
    reader.fetch(fetch_of("holder", card, [*range(8), 60], [*range(8, 16), 3]))
    assert run(ends_of(reader)).ended == [FetchEnd(1)]
    assert process.stdout.readline() == "done\n"
    assert (ours[[*range(8, 16), 3]] == arena_of(1_000)[[*range(8), 60]]).all()
    reader.close()


@needs_nixl
def test_process_that_died_is_an_error_and_the_next_one_is_read(
    holders: Callable[[str], Any],
) -> None:
    ours = np.zeros((BLOCKS, WORDS), np.uint64)
    reader = NixlTransfer("reader", ours)
    process, card = holders("holder-1")
    reader.fetch(fetch_of("holder-1", card, [1], [1]))
    assert run(ends_of(reader)).ended == [FetchEnd(1)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for tag in (2, 3):  # the known connection breaks, then a new one is refused
        reader.fetch(fetch_of("holder-1", card, [2], [2], tag))
        (end,) = run(ends_of(reader)).ended
        assert (end.tag, bool(end.error)) == (tag, True)
    assert not ours[2].any()
    _, card = holders("holder-2")
    reader.fetch(fetch_of("holder-2", card, [2], [2], 4))
    assert run(ends_of(reader)).ended == [FetchEnd(4)]
    reader.forget("holder-2")
    reader.close()
