"""KV transfers: one suite for NIXL and the one in memory, then NIXL between real processes."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.waits import PATIENCE_S, run, until
from tests.workers.kv.sockets import listening_sockets
from workers.kv.layout import Card, card_of, spans
from workers.kv.network import ucx_variables, variables
from workers.kv.nixl_transfer import NixlTransfer
from workers.kv.transfer import (
    BlockMove,
    Direction,
    KvTransfer,
    MemoryTransfer,
    MoveEnd,
    PollResult,
)

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs the package nixl")

BLOCKS, WORDS = 64, 128
READ, WRITE = Direction.READ, Direction.WRITE
Made = tuple[KvTransfer, Any]
KINDS: dict[str, Callable[[str, Any], KvTransfer]] = {
    "memory": MemoryTransfer,
    "nixl": NixlTransfer,
}
_numbers = itertools.count(1)


def regions_of(ranks: int, first: int = 0) -> Any:
    """An arena in as many regions; with `first`, every word of every block differs."""
    regions = np.zeros((ranks, BLOCKS, WORDS // ranks), np.uint64)
    if first:
        words = np.arange(first, first + BLOCKS * WORDS, dtype=np.uint64)
        put_blocks(regions, range(BLOCKS), words.reshape(BLOCKS, WORDS))
    return regions


def put_blocks(regions: Any, blocks: Sequence[int], words: Any) -> None:
    """The reference: rank r holds the r-th share of a block's words."""
    share = regions.shape[2]
    for i, block in enumerate(blocks):
        for rank in range(len(regions)):
            regions[rank, block] = words[i, rank * share : (rank + 1) * share]


def whole(regions: Any, blocks: Sequence[int]) -> Any:
    """The words of blocks as one rank would hold them: shape (blocks, WORDS)."""
    return np.array([np.concatenate([region[block] for region in regions]) for block in blocks])


def move_of(
    peer: str,
    card: bytes,
    blocks: list[int],
    local: list[int],
    tag: int = 1,
    direction: Direction = READ,
) -> BlockMove:
    return BlockMove(
        tag=tag,
        engine_id=peer,
        card=card,
        direction=direction,
        remote_blocks=blocks,
        local_blocks=local,
        notice=b"done",
        timeout_s=PATIENCE_S,
    )


async def ends_of(*transfers: KvTransfer, notices: int = 0, ends: int = 1) -> PollResult:
    """Poll until enough moves ended and notices arrived, on any side."""
    total = PollResult()

    def enough() -> bool:
        for transfer in transfers:
            polled = transfer.poll()
            total.ends += polled.ends
            total.notices += polled.notices
        return len(total.ends) >= ends and len(total.notices) >= notices

    await until(enough)
    return total


async def beside(transfer: KvTransfer, call: Callable[[], str]) -> str:
    """Return the result of a blocking call while the transfer makes progress."""
    calling = asyncio.ensure_future(asyncio.to_thread(call))

    def is_done() -> bool:
        transfer.poll()
        return calling.done()

    await until(is_done)
    return await calling


@pytest.fixture(params=["memory", pytest.param("nixl", marks=needs_nixl)])
def kind(request: pytest.FixtureRequest) -> Callable[[str, Any], KvTransfer]:
    return KINDS[request.param]


@pytest.fixture
def pair(kind: Callable[[str, Any], KvTransfer]) -> Iterator[tuple[Made, Made]]:
    mover_arena, holder_arena = regions_of(1), regions_of(1, first=1_000)
    sides = (
        (kind("mover", mover_arena), mover_arena),
        (kind("holder", holder_arena), holder_arena),
    )
    yield sides
    for transfer, _ in sides:
        transfer.close()


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_transfer_moves_blocks_to_requested_places(
    pair: tuple[Made, Made], direction: Direction
) -> None:
    (mover, mover_arena), (holder, holder_arena) = pair
    remote, local = [3, 4, 5, 9, 20, 21], [7, 8, 9, 1, 30, 40]
    before = holder_arena.copy()
    mover.move(move_of("holder", holder.metadata(), remote, local, direction=direction))
    polled = run(ends_of(mover, holder, notices=1))
    assert polled.ends == [MoveEnd(1)]
    assert polled.notices == [b"done"]
    assert (mover_arena[0, local] == holder_arena[0, remote]).all()
    if direction is READ:
        assert np.count_nonzero(mover_arena[0].any(axis=1)) == len(
            local
        )  # nothing else was touched
        assert (holder_arena == before).all()
    else:
        other_blocks = [block for block in range(BLOCKS) if block not in remote]
        assert (holder_arena[0, other_blocks] == before[0, other_blocks]).all()
        assert not holder_arena[0, remote].any()


@pytest.mark.parametrize("direction", [READ, WRITE])
@pytest.mark.parametrize("holder_ranks", [1, 2, 4])
@pytest.mark.parametrize("mover_ranks", [1, 2, 4])
def test_transfer_transposes_blocks_between_degrees(
    kind: Callable[[str, Any], KvTransfer],
    mover_ranks: int,
    holder_ranks: int,
    direction: Direction,
) -> None:
    number = next(_numbers)
    names = f"mover-{number}", f"holder-{number}"
    mover_arena, holder_arena = (
        regions_of(mover_ranks, first=1_000_000),
        regions_of(holder_ranks, first=1),
    )
    mover, holder = kind(names[0], mover_arena), kind(names[1], holder_arena)
    moves = [([3, 4, 5, 9], [7, 8, 9, 1]), ([63, 0], [0, 63]), ([62, 61], [30, 40])]
    source = whole(
        *((holder_arena, range(BLOCKS)) if direction is READ else (mover_arena, range(BLOCKS)))
    )
    target = whole(
        *((mover_arena, range(BLOCKS)) if direction is READ else (holder_arena, range(BLOCKS)))
    )
    for tag, (remote, local) in enumerate(moves):
        mover.move(move_of(names[1], holder.metadata(), remote, local, tag, direction))
        source_blocks, target_blocks = (remote, local) if direction is READ else (local, remote)
        target[target_blocks] = source[source_blocks]
    polled = run(ends_of(mover, holder, notices=len(moves), ends=len(moves)))
    assert not any(end.error for end in polled.ends)
    read, unread = (mover_arena, holder_arena) if direction is READ else (holder_arena, mover_arena)
    assert (whole(read, range(BLOCKS)) == target).all()
    assert (whole(unread, range(BLOCKS)) == source).all()
    mover.close()
    holder.close()


@pytest.mark.parametrize("ranks", [1, 4])
def test_transfer_moves_complete_arena(kind: Callable[[str, Any], KvTransfer], ranks: int) -> None:
    """Adjacent regions are not merged."""
    mover_arena, holder_arena = regions_of(ranks), regions_of(ranks, first=1)
    mover, holder = kind(f"all-{ranks}", mover_arena), kind(f"all-holder-{ranks}", holder_arena)
    blocks = list(range(BLOCKS))
    mover.move(move_of(f"all-holder-{ranks}", holder.metadata(), blocks, blocks))
    assert run(ends_of(mover, holder)).ends == [MoveEnd(1)]
    assert (mover_arena == holder_arena).all()
    mover.close()
    holder.close()


def test_transfer_sends_notice_without_blocks(pair: tuple[Made, Made]) -> None:
    (mover, mover_arena), (holder, _) = pair
    mover.move(move_of("holder", holder.metadata(), [], []))
    polled = run(ends_of(mover, holder, notices=1))
    assert polled.ends == [MoveEnd(1)]
    assert not mover_arena.any()


def test_transfer_sends_long_notice(pair: tuple[Made, Made]) -> None:
    """Notices list every block of a long prompt."""
    (mover, _), (holder, _) = pair
    notice = bytes(range(256)) * 200
    mover.move(
        BlockMove(
            tag=1, engine_id="holder", card=holder.metadata(), notice=notice, timeout_s=PATIENCE_S
        )
    )
    assert run(ends_of(mover, holder, notices=1)).notices == [notice]


def test_transfer_connects_without_notice(pair: tuple[Made, Made]) -> None:
    (mover, _), (holder, _) = pair
    mover.move(BlockMove(tag=1, engine_id="holder", card=holder.metadata(), timeout_s=PATIENCE_S))
    mover.move(move_of("holder", holder.metadata(), [], [], 2))
    polled = run(ends_of(mover, holder, notices=1, ends=2))
    assert polled.ends == [MoveEnd(1), MoveEnd(2)]
    assert polled.notices == [b"done"]


def test_transfer_reconnects_forgotten_peer(pair: tuple[Made, Made]) -> None:
    (mover, mover_arena), (holder, holder_arena) = pair
    for tag in (1, 2):
        mover.move(move_of("holder", holder.metadata(), [tag], [tag], tag))
        assert run(ends_of(mover, holder)).ends == [MoveEnd(tag)]
        mover.forget("holder")
    assert (mover_arena[0, 1:3] == holder_arena[0, 1:3]).all()


def test_transfer_runs_many_moves_concurrently(pair: tuple[Made, Made]) -> None:
    (mover, mover_arena), (holder, holder_arena) = pair
    for tag in range(20):
        mover.move(move_of("holder", holder.metadata(), [tag * 2], [63 - tag], tag))
    polled = run(ends_of(mover, holder, notices=20, ends=20))
    assert sorted(end.tag for end in polled.ends) == list(range(20))
    assert not any(end.error for end in polled.ends)
    assert (mover_arena[0, 63 - np.arange(20)] == holder_arena[0, np.arange(20) * 2]).all()


@pytest.mark.parametrize(
    ("peer", "card", "blocks", "error"),
    [
        ("holder", b"", [1], "expected 12 bytes or more"),
        ("another", None, [1], "expected engine another, found holder"),
        ("holder", None, [BLOCKS], "expected ids below 64"),
        ("holder", None, [-1], "expected ids below 64"),
        ("holder", None, [1, 2], "as many remote as local"),
    ],
)
def test_transfer_reports_invalid_move(
    pair: tuple[Made, Made], peer: str, card: bytes | None, blocks: list[int], error: str
) -> None:
    (mover, _), (holder, _) = pair
    card_bytes = holder.metadata() if card is None else card
    mover.move(move_of(peer, card_bytes, blocks, [1]))
    (end,) = run(ends_of(mover)).ends
    assert error in end.error
    assert end.settled


@pytest.mark.parametrize(
    ("card", "error"),
    [
        (Card([0], 8, BLOCKS, "holder", b""), "expected 1024 bytes, found 8"),
        (
            Card([], 1_024, BLOCKS, "holder", b""),
            "expected tensor parallelism that fits 1, found 0",
        ),
    ],
)
def test_transfer_rejects_incompatible_arena(
    pair: tuple[Made, Made], card: Card, error: str
) -> None:
    (mover, _), _ = pair
    mover.move(move_of("holder", card.pack(), [1], [1]))
    (end,) = run(ends_of(mover)).ends
    assert error in end.error


def test_transfer_metadata_is_small(pair: tuple[Made, Made]) -> None:
    (_, _), (holder, _) = pair
    assert len(holder.metadata()) < 2_000


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        ([], [], []),
        ([5], [2], [(5, 2, 1)]),
        ([1, 2, 3], [4, 5, 6], [(1, 4, 3)]),
        ([1, 2, 3], [4, 6, 7], [(1, 4, 1), (2, 6, 2)]),
        ([3, 2, 1], [3, 2, 1], [(1, 1, 3)]),
        ([3, 2, 1], [1, 2, 3], [(1, 3, 1), (2, 2, 1), (3, 1, 1)]),
    ],
)
def test_spans_merge_stretches_contiguous_on_both_sides(
    local: list[int], remote: list[int], expected: list[tuple[int, int, int]]
) -> None:
    local_card, remote_card = Card([0], 8, 8, "ours", b""), Card([1 << 20], 8, 8, "theirs", b"")
    stretches = [
        (our // 8, (their - (1 << 20)) // 8, count // 8)
        for our, their, count in spans(local_card, local, remote_card, remote)
    ]
    assert stretches == expected


def test_spans_of_equal_degrees_merge_within_each_rank() -> None:
    local_card, remote_card = (
        card_of(regions_of(2), "ours", b""),
        card_of(regions_of(2), "theirs", b""),
    )
    stretches = list(spans(local_card, [1, 2, 3], remote_card, [5, 6, 7]))
    assert [count for _, _, count in stretches] == [3 * WORDS * 4] * 2


@needs_nixl
def test_nixl_transfer_doubles_pauses_for_unreachable_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 50.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("workers.kv.nixl_transfer.time", clock)
    mover = NixlTransfer("mover", regions_of(1), reconnect_s=0.02, reconnect_max_s=0.03)
    card = replace(card_of(regions_of(1), "holder", b""), agent=b"no agent").pack()

    def failed() -> str:
        mover.move(move_of("holder", card, [1], [1]))
        (end,) = mover.poll().ends
        return end.error

    assert "not reached" not in failed()
    for pause_s in (0.02, 0.03, 0.03):  # doubled, up to the bound
        now_s += pause_s - 0.001
        assert "tried again in 0.001 s" in failed()
        now_s += 0.001_1
        assert "not reached" not in failed()
    mover.forget("holder")
    assert "not reached" not in failed()
    mover.close()


HOLDER = """
import sys, threading, time
import numpy as np
from workers.kv.network import ucx_variables, variables
from workers.kv.nixl_transfer import NixlTransfer
arena = np.arange(1000, 1000 + 64 * 128, dtype=np.uint64).reshape(1, 64, 128)
transfer = NixlTransfer(sys.argv[1], arena)
print(transfer.metadata().hex(), flush=True)
owner = threading.Thread(target=sys.stdin.read, daemon=True)
owner.start()
while owner.is_alive():
    for notice in transfer.poll().notices:
        print(notice.decode(), flush=True)
    time.sleep(0.002)
"""


@pytest.fixture
def holders() -> Iterator[Callable[[str], tuple["subprocess.Popen[str]", bytes]]]:
    """Start processes that hold an arena and only poll."""
    started: list[subprocess.Popen[str]] = []

    def start(engine_id: str) -> tuple["subprocess.Popen[str]", bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, engine_id],
            stdin=subprocess.PIPE,  # it ends when this process does
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, bytes.fromhex(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@needs_nixl
def test_nixl_transfer_reads_from_other_process(holders: Callable[[str], Any]) -> None:
    process, card = holders("holder")
    mover_arena = regions_of(1)
    mover = NixlTransfer("mover", mover_arena)
    mover.move(move_of("holder", card, [*range(8), 60], [*range(8, 16), 3]))
    assert run(ends_of(mover)).ends == [MoveEnd(1)]
    assert run(beside(mover, process.stdout.readline)) == "done\n"
    assert (
        mover_arena[0, [*range(8, 16), 3]] == regions_of(1, first=1_000)[0, [*range(8), 60]]
    ).all()
    mover.close()


@needs_nixl
def test_nixl_transfer_reports_dead_process_and_reads_successor(
    holders: Callable[[str], Any],
) -> None:
    mover_arena = regions_of(1)
    mover = NixlTransfer("mover", mover_arena)
    process, card = holders("holder-1")
    mover.move(move_of("holder-1", card, [1], [1]))
    assert run(ends_of(mover)).ends == [MoveEnd(1)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for tag in (2, 3):  # the known connection breaks, then a new one is refused
        mover.move(move_of("holder-1", card, [2], [2], tag))
        (end,) = run(ends_of(mover)).ends
        assert (end.tag, bool(end.error)) == (tag, True)
    assert not mover_arena[0, 2].any()
    _, card = holders("holder-2")
    mover.move(move_of("holder-2", card, [2], [2], 4))
    assert run(ends_of(mover)).ends == [MoveEnd(4)]
    mover.forget("holder-2")
    mover.close()


@needs_nixl
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (4, 1), (1, 4)])
def test_nixl_transfer_sends_one_descriptor_per_span(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    """NIXL's own count of descriptors equals the number of `spans`, in any order."""
    api = import_module("nixl._api")
    counting = partial(api.nixl_agent_config, capture_telemetry=True)
    monkeypatch.setattr(api, "nixl_agent_config", counting)
    arenas = regions_of(ranks[0]), regions_of(ranks[1], first=1_000)
    mover, holder = (
        NixlTransfer(*arguments) for arguments in zip(("mover", "holder"), arenas, strict=True)
    )
    counts: list[int] = []
    release = mover._release

    def released(flight: Any) -> None:
        counts.append(mover._agent.get_xfer_telemetry(flight.transfer).descCount)
        release(flight)

    monkeypatch.setattr(mover, "_release", released)
    cases: list[tuple[list[int], list[int], int]] = [
        ([*range(8)], [*range(20, 28)], 1),
        ([*range(7, -1, -1)], [*range(27, 19, -1)], 1),  # as they come back when freed
        ([0, 1, 2, 40, 41], [5, 6, 7, 8, 9], 2),
        ([3, 2, 1], [5, 6, 7], 3),
    ]
    local_card, remote_card = Card.unpack(mover.metadata()), Card.unpack(holder.metadata())
    for tag, (local, remote, whole_blocks) in enumerate(cases):
        mover.move(move_of("holder", holder.metadata(), remote, local, tag))
        assert run(ends_of(mover, holder, notices=1)).ends == [MoveEnd(tag)]
        expected = len(list(spans(local_card, local, remote_card, remote)))
        assert counts[tag] == expected
        if ranks[0] == ranks[1]:  # else pieces lie apart on the side of fewer ranks
            assert expected == whole_blocks * ranks[0]
    for transfer in (mover, holder):
        transfer.close()


@needs_nixl
def test_nixl_transfer_listens_only_on_loopback() -> None:
    """The kernel's table of sockets shows it; UCX by default takes every interface."""
    arena = regions_of(1)
    transfer = NixlTransfer(f"engine-{next(_numbers)}", arena)
    try:
        endpoints = listening_sockets(os.getpid())
        assert endpoints
        assert [(table, host) for table, host in endpoints if not host.is_loopback] == []
    finally:
        transfer.close()


def test_ucx_variables_respect_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert ucx_variables("eth1,mlx5_0:1") == {"UCX_NET_DEVICES": "eth1,mlx5_0:1"}
    assert ucx_variables("all") == {}
    with variables(ucx_variables("lo")):
        assert os.environ["UCX_NET_DEVICES"] == "lo"
        assert ucx_variables("eth1") == {}
    assert "UCX_NET_DEVICES" not in os.environ
