"""Threads of lanes: who is advanced, who takes over, and when the owner is called."""

import os
from typing import Any

import numpy as np
import pytest

from tests.waits import START_S, until
from tests.workers.vector.data import clustered_index, gaussian
from workers.vector.engine import lane_loop
from workers.vector.engine.core_lanes import CoreLanes
from workers.vector.index import plans
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import address_of
from workers.vector.traversal.slots import CpuSlots


async def test_lane_starts_next_search_without_owner() -> None:
    """Three searches share one place: never two run together, and all end unheard."""
    view = clustered_index(1_500).view()
    slots = CpuSlots(4, top_m_max=64, k_max=10)
    lanes = CoreLanes(slots, 1, places=1, extends_max=64, name="test")
    prepared = [
        plans.search_of(Effort(top_m=64), query[None], view, scanned_rows_max=0)
        for query in np.pad(gaussian(3, 20, seed=4), ((0, 0), (0, 12)))
    ]
    for slot, search in enumerate(prepared):
        lanes.start(slot, search)
    block = lanes._blocks[0]
    await until(lambda: block[lane_loop.ENDS_SENT] == 3)
    figures = lanes.stats()
    assert figures.places_used == figures.extends > 3 * 64
    assert lanes.collect_ended() == [0, 1, 2], "in the order in which they were told"
    lanes.close()


async def test_lane_reports_ending_before_sleep_with_parked_searches() -> None:
    """The ending waited for others to end with it, and those were parked."""
    lanes = CoreLanes(
        CpuSlots(4, top_m_max=64, k_max=10), 1, places=2, extends_max=64, name="test"
    )  # fmt: skip
    lanes._blocks[0][[lane_loop._PENDING, lane_loop.ENDS_SENT]] = 1
    lanes.tell(0, lane_loop.PARK)  # of nothing: the lane looks up, and has nothing to do

    def rang() -> bool:
        try:
            return os.eventfd_read(lanes.bell) > 0
        except BlockingIOError:
            return False

    await until(rang, seconds=START_S)
    lanes.close()


@pytest.fixture
def lane() -> Any:
    """A lane's block without its thread, and the bell of its owner."""
    owner = np.zeros(lane_loop.OWNER_SIZE, np.int64)
    block = np.zeros(lane_loop.block_size(8), np.int64)
    owner[lane_loop.OWN_BELL] = bell = os.eventfd(0, os.EFD_NONBLOCK)
    block[lane_loop.OWNER_BELL], block[lane_loop.OWNER_CALLED] = bell, address_of(owner)
    block[lane_loop._ONE] = 1

    def rings(endings: int, now_us: int, running: int, endings_read: int = 0) -> bool:
        block[lane_loop._RUNNING] = running
        block[lane_loop.ENDS_SENT] += endings
        block[lane_loop.ENDS_READ] += endings_read
        lane_loop._wake_owner_for(address_of(block), endings, now_us * 1_000)
        owner[lane_loop.CALLED] = 0
        try:
            return os.eventfd_read(bell) == 1
        except BlockingIOError:
            return False

    yield rings
    os.close(bell)


def test_lane_wakes_owner_for_four_endings_or_after_50_us(lane: Any) -> None:
    assert [lane(1, now, running=3) for now in (0, 10, 20, 30)] == [False, False, False, True]
    assert [lane(n, now, running=3) for n, now in ((1, 40), (0, 80), (0, 90), (0, 200))] == [
        False, False, True, False,
    ]  # fmt: skip


def test_lane_wakes_owner_at_once_when_idle(lane: Any) -> None:
    assert lane(1, 0, running=0)
    assert not lane(0, 100, running=0), "there is nothing to tell"


def test_lane_does_not_wake_owner_for_endings_already_read(lane: Any) -> None:
    """Another lane called the owner, which read the endings of all lanes."""
    assert [lane(1, now, running=3) for now in (0, 10, 20)] == [False, False, False]
    assert not lane(1, 30, running=3, endings_read=3), "one is left, and not late"
    assert not lane(1, 70, running=3)
    assert lane(0, 80, running=3) and not lane(0, 200, running=0, endings_read=2)
