"""Which search has which slot of which lane, and which of them gave their place away.

Lanes are told of each change as it is made. A search that is given up keeps its slot, and the
memory that it points to, until its lane has let go of it. `dispatcher.py` decides what changes.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from workers.search.engine.lane_loop import END, PARK, RESUME
from workers.search.engine.lanes import Lanes
from workers.search.engine.queues import QueuedSearch
from workers.search.engine.scheduler import Running
from workers.search.index import bulk, ways
from workers.search.kernels.arrays import Array
from workers.search.walk import fields
from workers.search.walk.slots import SlotRows


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket(QueuedSearch):
    """A search on its way; `reply` is its caller's."""

    search: ways.Search
    reply: "asyncio.Future[Any]"
    source: Array | None = None  # a feed: several queries, one after the other
    keeps: Any = None  # what the feed points to
    slot: int = -1
    waited_ms: float = 0.0  # for that slot
    was_parked: bool = False
    is_over: bool = False  # nobody wants its outcome any more


class Occupancy:
    """All searches that have a slot, and the slots that are free."""

    def __init__(self, slots: SlotRows, lanes: Lanes) -> None:
        self.tickets: dict[int, Ticket] = {}  # by slot, parked ones too
        self.parked: list[int] = []  # in order of parking
        self.active = [0] * lanes.count  # searches in a place, by lane
        each = lanes.slots_each
        self.free = [list(range(i * each, (i + 1) * each))[::-1] for i in range(lanes.count)]
        self._lane = [slot // each for slot in range(lanes.count * each)]  # by slot
        self._slots, self._lanes = slots, lanes

    @property
    def in_places(self) -> int:
        """Searches in a place."""
        return len(self.tickets) - len(self.parked)

    @property
    def free_slots(self) -> int:
        """Slots that hold no search at all."""
        return self._slots.count - len(self.tickets)

    def running(self, slot: int) -> Running:
        """The search in a slot, as a plan sees it."""
        ticket = self.tickets[slot]
        done = int(self._slots.fields[slot, fields.EXTENDS])
        return Running(
            slot=slot,
            kind=ticket.kind,
            extends_left=max(1, ticket.extends - done),
            may_park=not ticket.was_parked and not ticket.is_over,
        )

    @contextmanager
    def without(self, ended: Sequence[int]) -> Iterator[tuple[set[int], list[Running]]]:
        """Slots in a place and parked searches as they are without those that ended.

        Meanwhile what ended holds no place; it keeps its slot until it is released.
        """
        over = set(ended)
        left = [self._lane[slot] for slot in over.difference(self.parked)]
        for lane in left:
            self.active[lane] -= 1
        in_places = self.tickets.keys() - over.union(self.parked)
        yield in_places, [self.running(slot) for slot in self.parked if slot not in over]
        for lane in left:
            self.active[lane] += 1

    def admit(self, ticket: Ticket) -> None:
        """To the lane with the fewest searches of those that have a slot left."""
        active, free = self.active, self.free
        lane = active.index(min(active))
        if not free[lane]:
            lane = min((i for i, left in enumerate(free) if left), key=active.__getitem__)
        ticket.slot = slot = free[lane].pop()
        self.tickets[slot] = ticket
        active[lane] += 1
        if ticket.source is None:
            self._lanes.start(slot, ticket.search)
        else:
            bulk.take(self._slots, slot, ticket.search, ticket.source)
            self._lanes.run(slot, ticket.search)

    def park(self, slot: int) -> None:
        """A search gives its place away."""
        self.tickets[slot].was_parked = True
        self.parked.append(slot)
        self.active[self._lane[slot]] -= 1
        self._lanes.tell(slot, PARK)

    def resume(self, slot: int) -> None:
        """A parked search has a place again."""
        self.parked.remove(slot)
        self.active[self._lane[slot]] += 1
        self._lanes.tell(slot, RESUME)

    def run_again(self, ticket: Ticket) -> None:
        """A search that ended goes on, as a scan."""
        self._lanes.run(ticket.slot, ticket.search)
        if ticket.slot in self.parked:  # it ended before its lane heard that it is parked
            self._lanes.tell(ticket.slot, PARK)

    def give_up(self, ticket: Ticket) -> None:
        """Nobody wants the outcome any more; the slot is released when its lane says so."""
        ticket.is_over = True
        self._lanes.tell(ticket.slot, END)

    def release(self, ticket: Ticket, *, was_read: bool = False) -> None:
        """A search that has ended gives its slot back; `was_read`: its row is clear already."""
        slot, ticket.slot = ticket.slot, -1
        del self.tickets[slot]
        if slot in self.parked:
            self.parked.remove(slot)
        else:
            self.active[self._lane[slot]] -= 1
        if not was_read:
            self._slots.fields[slot] = fields.FREE  # it points to nothing any more
        self.free[self._lane[slot]].append(slot)
