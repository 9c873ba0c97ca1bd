"""One thread of the engine: some slots, a scheduler of its own, and the loop that advances them.

Theory of operation. Each turn takes what has arrived, plans (`scheduler.py`), parks, resumes and
admits, runs the kernel for a few extends without the interpreter's lock, and hands back what has
ended, all answers of a turn in one call. While the kernel runs, whoever submits sets `attention`,
so that an arrival waits for one extend at most. With nothing to do the thread sleeps in its inbox.
Other threads touch the inbox, `attention` and the figures, nothing else.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from schemas.errors import DeadlineExceeded, EngineDead, QueueFull, TriviumError
from workers.search import admission, bulk, fields, steps
from workers.search.admission import Search
from workers.search.query import Kind
from workers.search.scheduler import Drop, Item, Running, Scheduler, SchedulerSettings
from workers.search.slots import Slots

Array = np.ndarray[Any, Any]
Deliver = Callable[[Sequence[tuple[Any, Any]]], None]

_IDLE_S = 60.0
_SAMPLES_MAX = 2_048


@dataclass(slots=True, eq=False)
class Ticket:
    """A search on its way through a lane; `reply` is its caller's."""

    search: Search
    item: Item
    reply: Any
    source: Array | None = None  # a feed: several queries, one after the other
    slot: int = -1
    parked_before: bool = False


@dataclass(slots=True)
class Figures:
    """What a lane has done; written by its thread only."""

    searches: int = 0
    rounds: int = 0
    places_used: int = 0  # summed over rounds
    busy_s: float = 0.0


class Lane:
    """`submit` and `cancel` from any thread; `deliver` is called with lists of (reply, outcome)."""

    def __init__(
        self, slots: Slots, places: int, scheduler: SchedulerSettings, deliver: Deliver,
        clock_ms: Callable[[], float], *, extends_max: int, name: str,
    ) -> None:  # fmt: skip
        self.scheduler, self.places, self.figures = Scheduler(scheduler), places, Figures()
        self.waits: deque[tuple[Kind, float, float]] = deque(maxlen=_SAMPLES_MAX)
        self._slots, self._deliver, self._clock_ms = slots, deliver, clock_ms
        self._extends_max = extends_max
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._held: dict[int, Ticket] = {}  # by slot, parked ones too
        self._parked: list[int] = []
        self._free = list(range(slots.count))[::-1]
        self._active, self._finished = np.empty(slots.count, np.int64), np.empty(slots.count, int)
        self._outcomes: list[tuple[Any, Any]] = []
        self._closed = False
        self._waiting: set[Ticket] = set()  # in the scheduler's queues
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Searches without a slot."""
        return self._inbox.qsize() + len(self._waiting)

    @property
    def load(self) -> int:
        """Searches that wait or run here."""
        return self.waiting + len(self._held)

    @property
    def running(self) -> int:
        """Searches in a place."""
        return len(self._held) - len(self._parked)

    @property
    def parked(self) -> int:
        """Searches that gave their place away."""
        return len(self._parked)

    def submit(self, ticket: Ticket) -> None:
        """Take a search; its outcome comes through `deliver`."""
        self._tell("arrive", ticket)
        if self._closed:  # perhaps nobody heard
            self._deliver([(ticket.reply, EngineDead("the engine is closed"))])

    def cancel(self, ticket: Ticket) -> None:
        """The outcome is not wanted any more."""
        self._tell("cancel", ticket)

    def close(self) -> None:
        """End all searches with EngineDead, and the thread."""
        self._tell("close", None)
        self._thread.join()

    def _tell(self, what: str, ticket: Ticket | None) -> None:
        self._inbox.put((what, ticket))
        self._slots.attention[0] = 1

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException as error:
            self._end_all(f"the engine failed: {error!r}; restart the worker")
            raise
        self._end_all("the engine is closed")

    def _turn(self) -> None:
        """Hear, plan, run, answer."""
        self._slots.attention[0] = 0
        while not self._inbox.empty():
            self._hear(*self._inbox.get())
        now_ms = self._clock_ms()
        self._end_late(now_ms)
        wake_ms = self._plan(now_ms)
        active = [slot for slot in self._held if slot not in self._parked]
        if active:
            self._advance(active)
        if self._outcomes:
            self._deliver(self._outcomes)
            self._outcomes = []
        if not active and not self._closed:
            self._sleep((wake_ms - self._clock_ms()) / 1_000)

    def _sleep(self, most_s: float) -> None:
        try:
            self._hear(*self._inbox.get(timeout=max(0.0, min(most_s, _IDLE_S))))
        except queue.Empty:
            return

    def _hear(self, what: str, ticket: Any) -> None:
        if what == "close":
            self._closed = True
        elif what == "cancel":
            self._cancel(ticket)
        elif (refused := self.scheduler.arrive(ticket.item, self._clock_ms())) is not None:
            self._refuse(ticket, refused)
        else:
            self._waiting.add(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.slot >= 0:
            self._release(ticket)
        elif ticket in self._waiting:
            self._waiting.discard(ticket)
            self.scheduler.cancel(ticket.item)

    def _refuse(self, ticket: Ticket, why: Drop) -> None:
        self._waiting.discard(ticket)
        error: TriviumError = DeadlineExceeded(
            f"the deadline passed, or cannot be met any more, before the search had a slot: {why}; "
            "give it more time, or add workers"
        )
        if why is Drop.QUEUE_FULL:
            most = self.scheduler.settings.queue_max
            error = QueueFull(f"expected fewer than {most} waiting searches; try again later")
        self._outcomes.append((ticket.reply, error))

    def _end_late(self, now_ms: float) -> None:
        for ticket in list(self._held.values()):
            if ticket.item.deadline_ms <= now_ms:
                late = DeadlineExceeded("the deadline passed during the search; give it more time")
                self._outcomes.append((ticket.reply, late))
                self._release(ticket)

    def _plan(self, now_ms: float) -> float:
        """Do what the scheduler says; when to ask it again."""
        if not len(self.scheduler) and not self._parked:
            return float("inf")
        used = len(self._held) - len(self._parked)
        running: list[Running] = []
        if self.scheduler.waiting(Kind.PREFILL):  # only prefill takes the places of others
            running = [self._running(t) for t in self._held.values() if t.slot not in self._parked]
        parked = [self._running(self._held[slot]) for slot in self._parked]
        free = self.places - used
        plan = self.scheduler.plan(now_ms, free, len(self._free), running, parked)
        for slot in plan.park:
            self._held[slot].parked_before = True
            self._parked.append(slot)
        for slot in plan.resume:
            self._parked.remove(slot)
        for item in plan.admit:
            self._admit(item.search, now_ms)
        for item, why in plan.dropped:
            self._refuse(item.search, why)
        return plan.wake_ms

    def _running(self, ticket: Ticket) -> Running:
        done = int(self._slots.fields[ticket.slot, fields.EXTENDS])
        return Running(
            slot=ticket.slot,
            kind=ticket.item.kind,
            extends_left=max(1, ticket.item.extends - done),
            may_park=not ticket.parked_before,
        )

    def _admit(self, ticket: Ticket, now_ms: float) -> None:
        self._waiting.discard(ticket)
        ticket.slot = slot = self._free.pop()
        self._held[slot] = ticket
        self.waits.append((ticket.item.kind, now_ms - ticket.item.arrived_ms, now_ms))
        if ticket.source is None:
            self._slots.fields[slot] = ticket.search.row
        else:
            bulk.take(self._slots, slot, ticket.search, ticket.source)

    def _release(self, ticket: Ticket) -> None:
        slot, ticket.slot = ticket.slot, -1
        del self._held[slot]
        if slot in self._parked:
            self._parked.remove(slot)
        self._slots.fields[slot] = fields.FREE  # it points to nothing any more
        self._free.append(slot)

    def _advance(self, active: list[int]) -> None:
        slots, count = self._slots, len(active)
        self._active[:count] = active
        began_s = perf_counter()
        ended, rounds = steps.advance(
            slots.fields, slots.top, slots.found, slots.visited, self._active, count, slots.tasks,
            self._finished, self._extends_max, slots.attention,
        )  # fmt: skip
        took_s = perf_counter() - began_s
        if rounds:
            self.scheduler.measured(took_s * 1_000 / rounds)
            self.figures.rounds += rounds
            self.figures.places_used += rounds * count
            self.figures.busy_s += took_s
        for slot in self._finished[:ended].tolist():
            self._finish(self._held[slot])

    def _finish(self, ticket: Ticket) -> None:
        if ticket.source is not None:
            self._outcomes.append((ticket.reply, ticket.source))
        elif admission.rescanned(ticket.search, self._slots, ticket.slot):
            return
        else:
            answer = admission.answered(ticket.search, self._slots, ticket.slot)
            self._outcomes.append((ticket.reply, answer))
        self.figures.searches += 1
        self._release(ticket)

    def _end_all(self, why: str) -> None:
        """No caller may wait for an outcome that does not come."""
        self._closed = True
        while not self._inbox.empty():
            what, ticket = self._inbox.get()
            if what == "arrive":
                self._waiting.add(ticket)
        ended = [*self._held.values(), *self._waiting]
        for ticket in list(self._held.values()):
            self._release(ticket)
        self._waiting.clear()
        self._deliver([*self._outcomes, *((t.reply, EngineDead(why)) for t in ended)])
