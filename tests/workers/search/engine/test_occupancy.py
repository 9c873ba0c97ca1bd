"""Which search has which slot: lanes fill evenly, and who gives a place away keeps the slot."""

import asyncio
from typing import Any

import numpy as np

from tests.workers.search.data import clustered_index
from workers.deadlines import NEVER_MS
from workers.search.engine.lane_loop import END, PARK, RESUME
from workers.search.engine.occupancy import Occupancy, Ticket
from workers.search.index import plans
from workers.search.index.kinds import SearchKind
from workers.search.index.query import Effort
from workers.search.walk import fields
from workers.search.walk.slots import CpuSlots


class FakeLanes:
    """Two lanes of two slots, which note what they are told."""

    count, slots_each = 2, 2

    def __init__(self) -> None:
        self.told: list[tuple[Any, int]] = []

    def start(self, slot: int, search: plans.PreparedSearch) -> None:
        self.told.append(("start", slot))

    def run(self, slot: int, search: plans.PreparedSearch) -> None:
        self.told.append(("run", slot))

    def tell(self, slot: int, kind: int) -> None:
        self.told.append((kind, slot))


def occupied(count: int) -> tuple[Occupancy, FakeLanes, list[Ticket]]:
    lanes = FakeLanes()
    held = Occupancy(CpuSlots(4, top_m_max=64, k_max=10), lanes)  # type: ignore[arg-type]  # a fake
    search = plans.search_of(Effort(), np.zeros((1, 32), np.float32), clustered_index(1_100).view())
    reply = asyncio.get_running_loop().create_future()
    tickets = [
        Ticket(SearchKind.DECODE, 9, arrived_ms=0, deadline_ms=NEVER_MS, search=search, reply=reply)
        for _ in range(count)
    ]
    for ticket in tickets:
        held.admit(ticket)
    return held, lanes, tickets


async def test_lanes_are_filled_evenly_and_as_long_as_they_have_slots() -> None:
    held, lanes, tickets = occupied(4)
    assert [ticket.slot // 2 for ticket in tickets] == [0, 1, 0, 1]
    assert held.active == [2, 2] and held.free_slots == 0
    assert [what for what, _ in lanes.told] == ["start"] * 4
    held.park(tickets[0].slot)  # its lane has fewer in places now, and no slot
    held.leave([tickets[1].slot])
    held.release(tickets[1], False)
    another = Ticket(SearchKind.LINK, 1, arrived_ms=0, deadline_ms=NEVER_MS,
                     search=tickets[0].search, reply=tickets[0].reply)  # fmt: skip
    held.admit(another)
    assert another.slot // 2 == 1 and held.active == [1, 2]


async def test_who_parks_keeps_the_slot_and_parks_once() -> None:
    held, lanes, (one, two) = occupied(2)
    held.park(one.slot)
    assert (held.in_places, held.free_slots, held.parked) == (1, 2, [one.slot])
    assert not held.running(one.slot).may_park and held.running(two.slot).may_park
    held.run_again(one)
    assert lanes.told[-2:] == [("run", one.slot), (PARK, one.slot)], "it stays parked"
    held.resume(one.slot)
    assert lanes.told[-1] == (RESUME, one.slot) and (held.in_places, held.parked) == (2, [])


async def test_what_ended_holds_no_place_while_a_plan_is_made() -> None:
    held, _, (one, two, three) = occupied(3)
    held.park(two.slot)
    ended = [one.slot, two.slot]
    held.leave(ended)
    assert [each.slot for each in held.all_running(ended)] == [three.slot]
    assert held.all_parked(ended) == [] and [each.slot for each in held.all_parked([])] == [
        two.slot
    ]
    assert sum(held.active) == 1 and held.free_slots == 1, "slots are kept until released"
    held.run_again(one)
    held.run_again(two)  # parked, as before
    assert (held.in_places, sum(held.active)) == (2, 2)


async def test_a_slot_is_free_when_its_lane_has_let_go() -> None:
    held, lanes, (one, two) = occupied(2)
    slot = one.slot
    held._slots.fields[slot, fields.EXTENDS] = 4
    assert held.running(slot).extends_left == 5
    held.give_up(one)
    assert lanes.told[-1] == (END, slot) and one.is_over and held.free_slots == 2
    held.leave([one.slot])
    held.release(one, False)
    assert one.slot == -1 and not held._slots.fields[slot].any()
    assert held.tickets == {two.slot: two} and sorted(held.active) == [0, 1]
