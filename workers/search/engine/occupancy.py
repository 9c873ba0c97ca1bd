"""Which search has which slot of which lane, and which of them gave their place away.

Lanes are told of each change as it is made. A search that is given up keeps its slot, and the
memory that it points to, until its lane has let go of it. `dispatcher.py` decides what changes.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from workers.search.engine.lane_loop import END, PARK, RESUME
from workers.search.engine.lanes import Lanes
from workers.search.engine.queues import QueuedSearch
from workers.search.engine.scheduler import Running
from workers.search.index import bulk, plans
from workers.search.index.kinds import SearchKind
from workers.search.kernels.arrays import Array
from workers.search.walk import fields
from workers.search.walk.slots import SlotRows


class Ticket(QueuedSearch):
    """A search on its way; `reply` is its caller's.

    Every search makes one, and a dataclass's keywords would cost it 0.3 us.
    """

    __slots__ = ("is_over", "keeps", "reply", "slot", "source", "waited_ms", "was_parked")
    search: plans.PreparedSearch

    def __init__(
        self, kind: SearchKind, extends: int, arrived_ms: float, deadline_ms: float,
        search: plans.PreparedSearch, reply: "asyncio.Future[Any]",
        source: Array | None = None, keeps: Any = None,
    ) -> None:  # fmt: skip
        """`source` is a feed: several queries, one after the other; it points to `keeps`."""
        self.kind, self.extends = kind, extends
        self.arrived_ms, self.deadline_ms = arrived_ms, deadline_ms
        self.search, self.reply, self.source, self.keeps = search, reply, source, keeps
        self.waits = self.was_parked = False
        self.is_over = False  # then nobody wants its outcome any more
        self.slot, self.waited_ms = -1, 0.0  # it waited so long for that slot


class Occupancy:
    """All searches that have a slot, and the slots that are free."""

    def __init__(self, slots: SlotRows, lanes: Lanes) -> None:
        self.tickets: dict[int, Ticket] = {}  # by slot, parked ones too
        self.parked: list[int] = []  # in order of parking
        self.in_places = 0  # searches in a place
        self.active = [0] * lanes.count  # likewise, by lane
        size = lanes.slots_each
        self.free = [list(range(i * size, (i + 1) * size))[::-1] for i in range(lanes.count)]
        self._lane = [slot // size for slot in range(lanes.count * size)]  # by slot
        self._slots, self._lanes = slots, lanes

    @property
    def free_slots(self) -> int:
        """Slots that hold no search at all."""
        return self._slots.count - len(self.tickets)

    def running(self, slot: int) -> Running:
        """The search in a slot, as a plan sees it."""
        ticket = self.tickets[slot]
        extends_done = int(self._slots.fields[slot, fields.EXTENDS])
        return Running(
            slot=slot,
            kind=ticket.kind,
            extends_left=max(1, ticket.extends - extends_done),
            may_park=not ticket.was_parked and not ticket.is_over,
        )

    def leave(self, ended_slots: Sequence[int]) -> None:
        """What ended holds no place any more; it keeps its slot until it is released."""
        for slot in ended_slots:
            if slot not in self.parked:
                self.active[self._lane[slot]] -= 1
                self.in_places -= 1

    def all_running(self, ended_slots: Sequence[int]) -> Iterator[Running]:
        """Searches in places, of which `ended` have left."""
        for slot in self.tickets.keys() - set(ended_slots).union(self.parked):
            yield self.running(slot)

    def all_parked(self, ended_slots: Sequence[int]) -> list[Running]:
        """Searches that gave their place away, in order of parking, without those that ended."""
        return [self.running(slot) for slot in self.parked if slot not in ended_slots]

    def max_extends(self) -> int:
        """Return the most extends that any search in a slot takes."""
        return max((ticket.extends for ticket in self.tickets.values()), default=0)

    def admit(self, ticket: Ticket) -> None:
        """To the lane with the fewest searches of those that have a slot left."""
        active, free = self.active, self.free
        lane = active.index(min(active))
        if not free[lane]:
            lane = min((i for i, slots in enumerate(free) if slots), key=active.__getitem__)
        ticket.slot = slot = free[lane].pop()
        self.tickets[slot] = ticket
        self.in_places += 1
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
        self.in_places -= 1
        self.active[self._lane[slot]] -= 1
        self._lanes.tell(slot, PARK)

    def resume(self, slot: int) -> None:
        """A parked search has a place again."""
        self.parked.remove(slot)
        self.in_places += 1
        self.active[self._lane[slot]] += 1
        self._lanes.tell(slot, RESUME)

    def run_again(self, ticket: Ticket) -> None:
        """A search that ended goes on, as a scan."""
        self._lanes.run(ticket.slot, ticket.search)
        if ticket.slot in self.parked:  # it ended before its lane heard that it is parked
            self._lanes.tell(ticket.slot, PARK)
        else:
            self.in_places += 1
            self.active[self._lane[ticket.slot]] += 1

    def give_up(self, ticket: Ticket) -> None:
        """Nobody wants the outcome any more; the slot is released when its lane says so."""
        ticket.is_over = True
        self._lanes.tell(ticket.slot, END)

    def release(self, ticket: Ticket, was_read: bool) -> None:
        """A search that has left gives its slot back; `was_read`: its row is clear already."""
        slot, ticket.slot = ticket.slot, -1
        del self.tickets[slot]
        if self.parked and slot in self.parked:
            self.parked.remove(slot)
        if not was_read:
            self._slots.fields[slot] = fields.FREE  # it points to nothing any more
        self.free[self._lane[slot]].append(slot)
