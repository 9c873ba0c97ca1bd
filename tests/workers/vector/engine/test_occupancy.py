"""Which search has which slot: lanes fill evenly, and who gives a place away keeps the slot."""

import asyncio
from typing import Any

import numpy as np

from tests.workers.vector.data import clustered_index
from workers.vector.engine.lane_loop import END, PARK, RESUME
from workers.vector.engine.occupancy import Occupancy, Ticket
from workers.vector.engine.queues import NEVER_MS
from workers.vector.index import plans
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Effort
from workers.vector.traversal import fields
from workers.vector.traversal.slots import CpuSlots


class FakeLanes:
    """Two lanes of two slots, which note what they are told."""

    count, slots_each = 2, 2

    def __init__(self) -> None:
        self.commands: list[tuple[Any, int]] = []

    def start(self, slot: int, search: plans.PreparedSearch) -> None:
        self.commands.append(("start", slot))

    def run(self, slot: int, search: plans.PreparedSearch) -> None:
        self.commands.append(("run", slot))

    def tell(self, slot: int, kind: int) -> None:
        self.commands.append((kind, slot))


def occupied(count: int) -> tuple[Occupancy, FakeLanes, list[Ticket]]:
    lanes = FakeLanes()
    occupancy = Occupancy(CpuSlots(4, top_m_max=64, k_max=10), lanes)  # type: ignore[arg-type]  # a fake
    search = plans.search_of(Effort(), np.zeros((1, 32), np.float32), clustered_index(1_100).view())
    reply = asyncio.get_running_loop().create_future()
    tickets = [
        Ticket(SearchKind.DECODE, 9, arrived_ms=0, deadline_ms=NEVER_MS, search=search, reply=reply)
        for _ in range(count)
    ]
    for ticket in tickets:
        occupancy.admit(ticket)
    return occupancy, lanes, tickets


async def test_occupancy_fills_lanes_evenly_up_to_their_slots() -> None:
    occupancy, lanes, tickets = occupied(4)
    assert [ticket.slot // 2 for ticket in tickets] == [0, 1, 0, 1]
    assert occupancy.active == [2, 2] and occupancy.free_slots == 0
    assert [what for what, _ in lanes.commands] == ["start"] * 4
    occupancy.park(tickets[0].slot)  # its lane has fewer in places now, and no slot
    occupancy.leave([tickets[1].slot])
    occupancy.release(tickets[1], False)
    another = Ticket(SearchKind.LINK, 1, arrived_ms=0, deadline_ms=NEVER_MS,
                     search=tickets[0].search, reply=tickets[0].reply)  # fmt: skip
    occupancy.admit(another)
    assert another.slot // 2 == 1 and occupancy.active == [1, 2]


async def test_occupancy_parks_search_once_and_keeps_its_slot() -> None:
    occupancy, lanes, (first, second) = occupied(2)
    occupancy.park(first.slot)
    assert (occupancy.in_places, occupancy.free_slots, occupancy.parked) == (1, 2, [first.slot])
    assert not occupancy.running(first.slot).may_park and occupancy.running(second.slot).may_park
    occupancy.run_again(first)
    assert lanes.commands[-2:] == [("run", first.slot), (PARK, first.slot)], "it stays parked"
    occupancy.resume(first.slot)
    assert lanes.commands[-1] == (RESUME, first.slot) and (
        occupancy.in_places,
        occupancy.parked,
    ) == (2, [])


async def test_occupancy_frees_places_of_ended_searches_before_plan() -> None:
    occupancy, _, (first, second, third) = occupied(3)
    occupancy.park(second.slot)
    ended_slots = [first.slot, second.slot]
    occupancy.leave(ended_slots)
    assert [search.slot for search in occupancy.all_running(ended_slots)] == [third.slot]
    assert occupancy.all_parked(ended_slots) == [] and [
        search.slot for search in occupancy.all_parked([])
    ] == [second.slot]
    assert sum(occupancy.active) == 1 and occupancy.free_slots == 1, "slots are kept until released"
    occupancy.run_again(first)
    occupancy.run_again(second)  # parked, as before
    assert (occupancy.in_places, sum(occupancy.active)) == (2, 2)


async def test_occupancy_frees_slot_after_lane_release() -> None:
    occupancy, lanes, (first, second) = occupied(2)
    slot = first.slot
    occupancy._slots.fields[slot, fields.EXTENDS] = 4
    assert occupancy.running(slot).extends_left == 5
    occupancy.give_up(first)
    assert lanes.commands[-1] == (END, slot) and first.is_over and occupancy.free_slots == 2
    occupancy.leave([first.slot])
    occupancy.release(first, False)
    assert first.slot == -1 and not occupancy._slots.fields[slot].any()
    assert occupancy.tickets == {second.slot: second} and sorted(occupancy.active) == [0, 1]
