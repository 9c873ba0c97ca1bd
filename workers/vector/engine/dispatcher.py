"""Moves searches between callers and lanes: decides when to plan, and carries the plans out.

Theory of operation. All code here runs in the callers' event loop, and nothing here waits. The
arrivals of one iteration of the loop, and the searches that lanes have ended, are handled in one
*tick*: plan (`scheduler.py`), tell the lanes to run, park and resume searches, answer ended ones,
and end late ones. The plan comes first, so that lanes work while answers are made, unless it needs
the slots of ended searches. A tick follows arrivals, the lanes' bell, and the time that the last
plan named. Arrivals that find all places taken are only queued, unless a tick would park a search
for them. A search that arrives while a place is free and no search waits goes to a lane at once, as
a plan would decide. At most `_DIRECT_MAX` do so between two ticks: if searches arrive faster than
the event loop takes them, the scheduler should choose the urgent ones. Slots: see `occupancy.py`.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from schemas.errors import DeadlineExceeded, EngineDead, QueueFull, TriviumError
from workers.vector.engine.lanes import Lanes
from workers.vector.engine.occupancy import Occupancy, Ticket
from workers.vector.engine.queues import NEVER_MS
from workers.vector.engine.scheduler import Drop, SchedulerSettings, SearchScheduler
from workers.vector.index import plans
from workers.vector.index.kinds import SearchKind
from workers.vector.traversal.results import SlotReader
from workers.vector.traversal.slots import SlotRows

_WAITS_MAX = 1_024  # waits that percentiles are taken from; more would not stay in the cache
_DIRECT_MAX = 8  # searches that go to a lane at once, between two ticks


class SearchDispatcher:
    """The searches of one engine; one event loop calls `submit` and `cancel`."""

    def __init__(
        self, slots: SlotRows, lanes: Lanes, places: int,
        scheduler: SchedulerSettings, clock_ms: Callable[[], float], inbox_max: int,
    ) -> None:  # fmt: skip
        self.scheduler, self.places, self.searches = SearchScheduler(scheduler), places, 0
        self.waits: deque[tuple[SearchKind, float, float]] = deque(maxlen=_WAITS_MAX)
        self.closed = ""  # the reason, once it is closed
        self.is_due = False  # whether a tick follows in this or the next iteration of the loop
        self.due_ms = 0.0  # when `is_due` was set: the arrival time of searches until the tick
        self.lanes = lanes
        self.occupancy = Occupancy(slots, lanes)
        self._slots, self._clock_ms, self._reader = slots, clock_ms, SlotReader(slots)
        self._inbox_max = inbox_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_deadline_ms = NEVER_MS  # a lower bound of the deadlines of searches in slots
        self._direct_count = 0  # searches that went to a lane at once since the last tick
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = math.inf

    def submit(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Take a search, whose `reply` gets its outcome.

        Raises EngineDead, QueueFull or DeadlineExceeded."""
        if self._loop is not loop:
            self._begin(loop)
        if self.closed:
            raise EngineDead(self.closed)
        occupancy = self.occupancy
        if (
            self._direct_count < _DIRECT_MAX
            and occupancy.in_places < self.places
            and not occupancy.parked
            and self.scheduler.admits_at_once(ticket)
        ):
            self._direct_count += 1
            self._admit(ticket, ticket.arrived_ms)
            if ticket.deadline_ms < self._alarm_ms:
                self._set_alarm(ticket.deadline_ms, ticket.arrived_ms)
            return
        if (waiting := self.scheduler.queues.total) >= self._inbox_max:
            raise QueueFull(
                f"expected fewer than {self._inbox_max} waiting searches, found {waiting}; "
                "try again later"
            )
        if (refused := self.scheduler.arrive(ticket, ticket.arrived_ms)) is not None:
            raise self._drop_error(refused)
        if not self.is_due:
            self.is_due, self.due_ms = True, ticket.arrived_ms
            loop.call_soon(self._on_arrival)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a search whose caller no longer waits."""
        if ticket.waits:
            self.scheduler.queues.cancel(ticket)
        elif ticket.slot >= 0 and not ticket.is_over:
            self.occupancy.give_up(ticket)

    def stop_accepting(self, why: str) -> None:
        """Refuse new searches and ignore the bell; call it before the lanes are closed."""
        self.closed = self.closed or why
        if self._alarm is not None:
            self._alarm.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.lanes.bell)

    def end_all(self) -> None:
        """End all searches with EngineDead; call it after the lanes are closed."""
        self.occupancy.leave(list(self.occupancy.tickets))
        for ticket in list(self.occupancy.tickets.values()):
            self.occupancy.release(ticket, False)
            _settle(ticket, EngineDead(self.closed))
        for item in self.scheduler.queues.drain():
            _settle(cast("Ticket", item), EngineDead(self.closed))

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._loop is None, "an engine belongs to one event loop"
        self._loop = loop
        if not self.closed:
            loop.add_reader(self.lanes.bell, self._tick)

    def _on_arrival(self) -> None:
        """Tick after arrivals, or only set the alarm if all places are taken and none is urgent."""
        if not self.is_due:
            return
        if self.occupancy.in_places >= self.places and not self.closed:
            wake_ms = self.scheduler.idle_until_ms(self.due_ms, self.occupancy.max_extends)
            if wake_ms > self.due_ms:
                self.is_due = False
                if wake_ms < self._alarm_ms:
                    self._set_alarm(wake_ms, self.due_ms)
                return
        self._tick()

    def _tick(self) -> None:
        """Plan, command the lanes, answer ended searches, and end late ones."""
        self.is_due, self._direct_count = False, 0
        if self.closed:
            return
        if self.lanes.failure is not None:
            self.stop_accepting(f"the engine failed: {self.lanes.failure!r}; restart the worker")
            self.end_all()
            return
        occupancy, ended_slots = self.occupancy, self.lanes.collect_ended()
        if (ms_per_extend := self.lanes.ms_per_extend()) is not None:
            self.scheduler.add_measurement(ms_per_extend)
        now_ms = self._clock_ms()
        fits = occupancy.free_slots >= len(ended_slots)
        occupancy.leave(ended_slots)
        wake_ms = self._plan(now_ms, ended_slots) if fits else math.inf  # lanes work meanwhile
        if ended_slots:
            self._answer(ended_slots)
        if not fits:
            wake_ms = self._plan(now_ms, ())
        if now_ms >= self._next_deadline_ms:
            self._end_late(now_ms)
        wake_ms = min(wake_ms, self._next_deadline_ms)
        if wake_ms < self._alarm_ms:
            self._set_alarm(wake_ms, now_ms)

    def _end_late(self, now_ms: float) -> None:
        """End searches in slots whose deadline has passed."""
        self._next_deadline_ms = NEVER_MS
        for ticket in self.occupancy.tickets.values():
            if ticket.is_over:
                continue
            if ticket.deadline_ms > now_ms:
                self._next_deadline_ms = min(self._next_deadline_ms, ticket.deadline_ms)
                continue
            late = DeadlineExceeded("the deadline passed during the search; give it more time")
            _settle(ticket, late)
            self.occupancy.give_up(ticket)

    def _set_alarm(self, wake_ms: float, now_ms: float) -> None:
        """Schedule a tick; one that comes too early schedules the next by itself."""
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ms = wake_ms
        self._alarm = self._loop.call_later(max(0.0, wake_ms - now_ms) / 1_000, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_ms = None, math.inf
        self._tick()

    def _plan(self, now_ms: float, ended_slots: Sequence[int]) -> float:
        """Carry out a plan of the scheduler; return when to plan again.

        Ended searches have left their places already; they leave their slots when they are
        answered, later in this tick.
        """
        occupancy = self.occupancy
        if not self.scheduler.queues.total and not occupancy.parked:
            return math.inf
        plan = self.scheduler.plan(
            now_ms, max(0, self.places - occupancy.in_places), occupancy.free_slots,
            occupancy.all_running(ended_slots),
            occupancy.all_parked(ended_slots) if occupancy.parked else (), occupancy.max_extends,
        )  # fmt: skip
        for slot in plan.park:
            occupancy.park(slot)
        for slot in plan.resume:
            occupancy.resume(slot)
        for ticket in cast("list[Ticket]", plan.admit):
            self._admit(ticket, now_ms)
        for item, why in plan.dropped:
            _settle(cast("Ticket", item), self._drop_error(why))
        return plan.wake_ms

    def _admit(self, ticket: Ticket, now_ms: float) -> None:
        self.occupancy.admit(ticket)
        ticket.waited_ms = waited_ms = now_ms - ticket.arrived_ms
        self.waits.append((ticket.kind, waited_ms, now_ms))
        if ticket.deadline_ms < self._next_deadline_ms:
            self._next_deadline_ms = ticket.deadline_ms

    def _answer(self, ended_slots: Sequence[int]) -> None:
        """Answer the searches in ended slots; one with too few hits restarts as a scan."""
        occupancy = self.occupancy
        for slot, hits in zip(ended_slots, self._reader.read(ended_slots), strict=True):
            ticket = occupancy.tickets[slot]
            if not ticket.is_over:
                outcome: Any = ticket.source
                if outcome is None:
                    if hits is None:
                        assert plans.restart_as_scan(ticket.search, self._slots, slot)
                        occupancy.run_again(ticket)
                        continue
                    outcome = plans.answer(ticket.search, hits)
                    outcome.waited_ms = ticket.waited_ms
                self.searches += 1
                if not (reply := ticket.reply).done():
                    reply.set_result(outcome)
            occupancy.release(ticket, hits is not None)

    def _drop_error(self, why: Drop) -> TriviumError:
        if why is Drop.QUEUE_FULL:
            limit = self.scheduler.settings.queue_max
            return QueueFull(f"expected fewer than {limit} waiting searches; try again later")
        return DeadlineExceeded(
            f"the deadline passed, or cannot be met any more, before the search had a slot: {why}; "
            "give it more time, or add workers"
        )

    def waits_ms(
        self, kind: SearchKind, shares: Sequence[float], now_ms: float, window_ms: float
    ) -> list[float] | None:
        """Return quantiles, at `shares`, of a class's waits for a slot; None without waits."""
        waits = sorted(
            wait_ms
            for search_kind, wait_ms, at_ms in self.waits
            if search_kind is kind and now_ms - at_ms <= window_ms
        )
        return [waits[min(len(waits) - 1, int(s * len(waits)))] for s in shares] if waits else None


def _settle(ticket: Ticket, outcome: Any) -> None:
    if ticket.reply.done():
        return
    if isinstance(outcome, BaseException):
        ticket.reply.set_exception(outcome)
    else:
        ticket.reply.set_result(outcome)
