"""Records which search has which slot of which lane, and which searches are parked.

Each change is sent to the lanes as it is made. A search that is given up keeps its slot, and the
memory that the slot points to, until its lane has ended it. `dispatcher.py` decides the changes.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from workers.vector.engine.lane_loop import END, PARK, RESUME
from workers.vector.engine.lanes import Lanes
from workers.vector.engine.queues import QueuedSearch
from workers.vector.engine.scheduler import Running
from workers.vector.index import bulk, plans
from workers.vector.index.kinds import SearchKind
from workers.vector.kernels.arrays import Array
from workers.vector.traversal import fields
from workers.vector.traversal.slots import SlotRows


class Ticket(QueuedSearch):
    """A submitted search; its caller awaits `reply`.

    It is no dataclass because every search makes one, and keyword arguments would cost 0.3 us.
    """

    __slots__ = ("is_over", "keeps", "reply", "slot", "source", "waited_ms", "was_parked")
    search: plans.PreparedSearch

    def __init__(
        self, kind: SearchKind, extends: int, arrived_ms: float, deadline_ms: float,
        search: plans.PreparedSearch, reply: "asyncio.Future[Any]",
        source: Array | None = None, keeps: Any = None,
    ) -> None:  # fmt: skip
        """Make a ticket; `source` is a feed of several queries, and `keeps` its arrays."""
        self.kind, self.extends = kind, extends
        self.arrived_ms, self.deadline_ms = arrived_ms, deadline_ms
        self.search, self.reply, self.source, self.keeps = search, reply, source, keeps
        self.waits = self.was_parked = False
        self.is_over = False  # whether it was given up: no caller waits for its outcome
        self.slot, self.waited_ms = -1, 0.0  # the wait for the slot


class Occupancy:
    """All searches that have a slot, and the slots that are free."""

    def __init__(self, slots: SlotRows, lanes: Lanes) -> None:
        self.tickets: dict[int, Ticket] = {}  # by slot, parked ones too
        self.parked: list[int] = []  # slots, in order of parking
        self.in_places = 0  # searches in a place
        self.active = [0] * lanes.count  # searches in a place, by lane
        size = lanes.slots_each
        self.free = [list(range(i * size, (i + 1) * size))[::-1] for i in range(lanes.count)]
        self._lane = [slot // size for slot in range(lanes.count * size)]  # by slot
        self._slots, self._lanes = slots, lanes

    @property
    def free_slots(self) -> int:
        """Return the number of slots without a search."""
        return self._slots.count - len(self.tickets)

    def running(self, slot: int) -> Running:
        """Return the search in a slot as the scheduler's input."""
        ticket = self.tickets[slot]
        extends_done = int(self._slots.fields[slot, fields.EXTENDS])
        return Running(
            slot=slot,
            kind=ticket.kind,
            extends_left=max(1, ticket.extends - extends_done),
            may_park=not ticket.was_parked and not ticket.is_over,
        )

    def leave(self, ended_slots: Sequence[int]) -> None:
        """Take ended searches out of their places; they keep their slots until `release`."""
        for slot in ended_slots:
            if slot not in self.parked:
                self.active[self._lane[slot]] -= 1
                self.in_places -= 1

    def all_running(self, ended_slots: Sequence[int]) -> Iterator[Running]:
        """Yield the searches in places, without those in `ended_slots`."""
        for slot in self.tickets.keys() - set(ended_slots).union(self.parked):
            yield self.running(slot)

    def all_parked(self, ended_slots: Sequence[int]) -> list[Running]:
        """Return the parked searches, in order of parking, without those that ended."""
        return [self.running(slot) for slot in self.parked if slot not in ended_slots]

    def max_extends(self) -> int:
        """Return the most extends that any search in a slot takes."""
        return max((ticket.extends for ticket in self.tickets.values()), default=0)

    def admit(self, ticket: Ticket) -> None:
        """Start a search on the lane with the fewest searches that has a free slot."""
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
        """Park a search: it loses its place and keeps its slot."""
        self.tickets[slot].was_parked = True
        self.parked.append(slot)
        self.in_places -= 1
        self.active[self._lane[slot]] -= 1
        self._lanes.tell(slot, PARK)

    def resume(self, slot: int) -> None:
        """Give a parked search a place again."""
        self.parked.remove(slot)
        self.in_places += 1
        self.active[self._lane[slot]] += 1
        self._lanes.tell(slot, RESUME)

    def run_again(self, ticket: Ticket) -> None:
        """Restart an ended search as a scan."""
        self._lanes.run(ticket.slot, ticket.search)
        if ticket.slot in self.parked:  # it ended before its lane read the command PARK
            self._lanes.tell(ticket.slot, PARK)
        else:
            self.in_places += 1
            self.active[self._lane[ticket.slot]] += 1

    def give_up(self, ticket: Ticket) -> None:
        """End a search whose outcome is no longer wanted; `release` follows its lane's report."""
        ticket.is_over = True
        self._lanes.tell(ticket.slot, END)

    def release(self, ticket: Ticket, was_read: bool) -> None:
        """Free the slot of an ended search; `was_read`: its row is cleared already."""
        slot, ticket.slot = ticket.slot, -1
        del self.tickets[slot]
        if self.parked and slot in self.parked:
            self.parked.remove(slot)
        if not was_read:
            self._slots.fields[slot] = fields.FREE  # clears all addresses, too
        self.free[self._lane[slot]].append(slot)
