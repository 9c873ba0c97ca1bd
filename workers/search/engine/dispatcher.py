"""Between callers and lanes: which search waits, which has which slot, when to look again.

Theory of operation. All of it runs in the event loop of the callers, and nothing here waits. What
has arrived during an iteration of the loop, and what lanes have ended meanwhile, is looked at in
one *tick*: plan (`scheduler.py`), tell lanes what to run, park and resume, answer what ended, and
end what is late. The plan comes first, so that lanes go on while answers are made, unless it needs
the slots of what ended. A tick follows arrivals, the lanes' bell, and the moment that the last plan
named. A search that finds a free place and nobody waiting does not wait for one: it goes to a lane
at once, as a plan would decide. Only so many do between two ticks: where arrivals come faster than
the event loop takes them, they are to wait in the scheduler, which knows who is urgent.
A search that is given up while it runs keeps its slot, and the memory that it points to, until its
lane has let go of it.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from schemas.errors import DeadlineExceeded, EngineDead, QueueFull, TriviumError
from workers.deadlines import Deadlines
from workers.search.engine.lane_loop import END, PARK, RESUME
from workers.search.engine.lanes import Lanes
from workers.search.engine.queues import QueuedSearch
from workers.search.engine.scheduler import Drop, Running, Scheduler, SchedulerSettings
from workers.search.index import bulk, ways
from workers.search.index.kinds import Kind
from workers.search.kernels.arrays import Array
from workers.search.walk import fields
from workers.search.walk.results import SlotReader
from workers.search.walk.slots import SlotRows

_WAITS_MAX = 4_096
_DIRECT_MAX = 8  # searches that go to a lane at once, between two ticks


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


class Dispatcher:
    """`submit` and `cancel` from one event loop."""

    def __init__(
        self, slots: SlotRows, lanes: Lanes, places: int,
        scheduler: SchedulerSettings, clock_ms: Callable[[], float],
    ) -> None:  # fmt: skip
        self.scheduler, self.places, self.searches = Scheduler(scheduler), places, 0
        self.waits: deque[tuple[Kind, float, float]] = deque(maxlen=_WAITS_MAX)
        self.closed = ""  # why, once it is
        self.lanes = lanes
        self._slots, self._clock_ms, self._reader = slots, clock_ms, SlotReader(slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: dict[int, Ticket] = {}  # by slot, parked ones too
        self._parked: list[int] = []
        each = self.lanes.slots_each
        self._free = [list(range(i * each, (i + 1) * each))[::-1] for i in range(lanes.count)]
        self._active = [0] * lanes.count  # searches in a place
        self._deadlines = Deadlines[Ticket](lambda each: each.slot >= 0 and not each.is_over)
        self._is_due = False
        self._direct = 0  # since the last tick
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = math.inf

    @property
    def running(self) -> int:
        """Searches in a place."""
        return len(self._tickets) - len(self._parked)

    @property
    def parked(self) -> int:
        """Searches that gave their place away."""
        return len(self._parked)

    def submit(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Take a search; its outcome comes to its `reply`. Raises why not."""
        if self._loop is not loop:
            self._begin(loop)
        if self.closed:
            raise EngineDead(self.closed)
        if (
            self._direct < _DIRECT_MAX
            and not self._parked
            and len(self._tickets) < self.places
            and self.scheduler.passes(ticket)
        ):
            self._direct += 1
            self._admit(ticket, ticket.arrived_ms)
            if ticket.deadline_ms < self._alarm_ms:
                self._set_alarm(ticket.deadline_ms, ticket.arrived_ms)
            return
        refused = self.scheduler.arrive(ticket, ticket.arrived_ms)
        if refused is not None:
            raise self._why(refused)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._tick)

    def cancel(self, ticket: Ticket) -> None:
        """The outcome is not wanted any more."""
        if ticket.waits:
            self.scheduler.queues.cancel(ticket)
        elif ticket.slot >= 0 and not ticket.is_over:
            self._give_up(ticket)

    def hang_up(self, why: str) -> None:
        """Take no more and hear nothing any more; before lanes are closed."""
        self.closed = self.closed or why
        if self._alarm is not None:
            self._alarm.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.lanes.bell)

    def end_all(self) -> None:
        """No caller may wait for an outcome that does not come; lanes are closed."""
        for ticket in list(self._tickets.values()):
            self._release(ticket)
            _settle(ticket, EngineDead(self.closed))
        for item in self.scheduler.queues.cleared():
            _settle(cast("Ticket", item), EngineDead(self.closed))

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._loop is None, "an engine belongs to one event loop"
        self._loop = loop
        if not self.closed:
            loop.add_reader(self.lanes.bell, self._tick)

    def _tick(self) -> None:
        """Plan, run, answer, end."""
        self._is_due, self._direct = False, 0
        if self.closed:
            return
        if self.lanes.failure is not None:
            self.hang_up(f"the engine failed: {self.lanes.failure!r}; restart the worker")
            self.end_all()
            return
        ended = self.lanes.ended()
        if (ms_per_extend := self.lanes.ms_per_extend()) is not None:
            self.scheduler.measured(ms_per_extend)
        now_ms = self._clock_ms()
        goes_on = self._slots.count - len(self._tickets) >= len(ended)
        wake_ms = self._plan(now_ms, ended) if goes_on else math.inf  # lanes work on meanwhile
        for slot in ended:
            self._ended(slot)
        if not goes_on:
            wake_ms = self._plan(now_ms, ())
        for ticket in self._deadlines.passed(now_ms):
            late = DeadlineExceeded("the deadline passed during the search; give it more time")
            _settle(ticket, late)
            self._give_up(ticket)
        wake_ms = min(wake_ms, self._deadlines.next_ms())
        if wake_ms < self._alarm_ms:
            self._set_alarm(wake_ms, now_ms)

    def _set_alarm(self, wake_ms: float, now_ms: float) -> None:
        """One that rings earlier than is needed finds the next moment by itself."""
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ms = wake_ms
        self._alarm = self._loop.call_later(max(0.0, wake_ms - now_ms) / 1_000, self._rang)

    def _rang(self) -> None:
        self._alarm, self._alarm_ms = None, math.inf
        self._tick()

    def _plan(self, now_ms: float, ended: Sequence[int]) -> float:
        """Do what the scheduler says; when to ask it again.

        What ended gives back its place now, and its slot when it is answered, later in this tick.
        """
        if not len(self.scheduler) and not self._parked:
            return math.inf
        over = set(ended)
        parked = [self._running(slot) for slot in self._parked if slot not in over]
        in_places = self._tickets.keys() - over.union(self._parked)
        left = [slot // self.lanes.slots_each for slot in over.difference(self._parked)]
        for lane in left:
            self._active[lane] -= 1
        free_places = max(0, self.places - len(in_places))
        free_slots = self._slots.count - len(self._tickets)
        plan = self.scheduler.plan(
            now_ms, free_places, free_slots, map(self._running, in_places), parked,
            max((ticket.extends for ticket in self._tickets.values()), default=0),
        )  # fmt: skip
        for slot in plan.park:
            self._park(slot)
        for slot in plan.resume:
            self._parked.remove(slot)
            self._active[slot // self.lanes.slots_each] += 1
            self.lanes.tell(slot, RESUME)
        for item in plan.admit:
            self._admit(cast("Ticket", item), now_ms)
        for item, why in plan.dropped:
            _settle(cast("Ticket", item), self._why(why))
        for lane in left:
            self._active[lane] += 1
        return plan.wake_ms

    def _running(self, slot: int) -> Running:
        ticket = self._tickets[slot]
        done = int(self._slots.fields[slot, fields.EXTENDS])
        return Running(
            slot=slot,
            kind=ticket.kind,
            extends_left=max(1, ticket.extends - done),
            may_park=not ticket.was_parked and not ticket.is_over,
        )

    def _park(self, slot: int) -> None:
        self._tickets[slot].was_parked = True
        self._parked.append(slot)
        self._active[slot // self.lanes.slots_each] -= 1
        self.lanes.tell(slot, PARK)

    def _admit(self, ticket: Ticket, now_ms: float) -> None:
        """To the lane with the fewest searches of those that have a slot left."""
        active, free = self._active, self._free
        lane = active.index(min(active))
        if not free[lane]:
            lane = min((i for i, left in enumerate(free) if left), key=active.__getitem__)
        ticket.slot = slot = free[lane].pop()
        self._tickets[slot] = ticket
        active[lane] += 1
        ticket.waited_ms = now_ms - ticket.arrived_ms
        self.waits.append((ticket.kind, ticket.waited_ms, now_ms))
        self._deadlines.add(ticket.deadline_ms, ticket)
        if ticket.source is None:
            self.lanes.start(slot, ticket.search)
        else:
            bulk.take(self._slots, slot, ticket.search, ticket.source)
            self.lanes.run(slot, ticket.search)

    def _give_up(self, ticket: Ticket) -> None:
        ticket.is_over = True
        self.lanes.tell(ticket.slot, END)

    def _ended(self, slot: int) -> None:
        """A lane has let go of a search."""
        ticket = self._tickets[slot]
        if ticket.is_over:
            self._release(ticket)
            return
        outcome: Any = ticket.source
        if outcome is None:
            outcome = ways.answered(ticket.search, self._slots, slot, self._reader)
            if outcome is None:
                self._run_again(ticket)
                return
            outcome.waited_ms = ticket.waited_ms
        self.searches += 1
        _settle(ticket, outcome)
        self._release(ticket, ticket.source is None)

    def _run_again(self, ticket: Ticket) -> None:
        self.lanes.run(ticket.slot, ticket.search)
        if ticket.slot in self._parked:  # it ended before its lane heard that it is parked
            self.lanes.tell(ticket.slot, PARK)

    def _release(self, ticket: Ticket, was_read: bool = False) -> None:
        slot, ticket.slot = ticket.slot, -1
        lane = slot // self.lanes.slots_each
        del self._tickets[slot]
        if self._parked and slot in self._parked:
            self._parked.remove(slot)
        else:
            self._active[lane] -= 1
        if not was_read:
            self._slots.fields[slot] = fields.FREE  # it points to nothing any more
        self._free[lane].append(slot)

    def _why(self, why: Drop) -> TriviumError:
        if why is Drop.QUEUE_FULL:
            most = self.scheduler.settings.queue_max
            return QueueFull(f"expected fewer than {most} waiting searches; try again later")
        return DeadlineExceeded(
            f"the deadline passed, or cannot be met any more, before the search had a slot: {why}; "
            "give it more time, or add workers"
        )

    def waits_ms(
        self, kind: Kind, shares: Sequence[float], now_ms: float, window_ms: float
    ) -> list[float] | None:
        """Waits for a slot below which these shares of a class lie; None where there were none."""
        found = sorted(
            waited for of, waited, at_ms in self.waits if of is kind and now_ms - at_ms <= window_ms
        )
        return [found[min(len(found) - 1, int(s * len(found)))] for s in shares] if found else None


def _settle(ticket: Ticket, outcome: Any) -> None:
    if ticket.reply.done():
        return
    if isinstance(outcome, BaseException):
        ticket.reply.set_exception(outcome)
    else:
        ticket.reply.set_result(outcome)
