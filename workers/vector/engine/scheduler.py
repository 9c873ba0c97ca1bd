"""Decides which searches get free places of the batch: two queues, a reserved share, preemption.

It follows Trinity, section 3.3, and fills its gaps. Pure: time is an argument. `dispatcher.py`
calls `plan` once per tick and carries it out. The paper's loop that adjusts share and timeout is
left out: it missed more deadlines than one fixed setting in all loads (DECISIONS.md, 47).

Theory of operation. Prefill searches wait by slack, least first; slack is the deadline minus now
minus the expected time of their extends. Decode searches wait first in, first out. Of B free places
ceil(share * B) are reserved for prefill while it waits; places that one class cannot use go to the
other at once. Places mostly become free one at a time; of those, prefill gets its share by a
running count, and decode goes first in between. Prefill searches that can no longer meet their
deadline wait behind all others: to save one of them would only lose another. The third class, links
of new rows, gets the remaining places. A link gives its place at once to a search that finds none:
it is parked, and resumes when no search waits. A prefill search takes the place of a decode search
after a wait of `park_after_ms`, or if it would miss its deadline by waiting for the next free
place. The decode search is parked, and resumes before any new search of its class, with no work
lost. Each search is parked at most once. If places are free, up to `gather_min` arrivals are
gathered for one admission, but none waits longer than its flush timeout; prefill's is the shorter.
A waiting search is dropped when its deadline passes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.errors import ConfigError
from schemas.sections import Natural, NonNegative, Positive, Share, section
from workers.vector.engine.queues import NEVER_MS, Fifo, QueuedSearch, SearchQueues
from workers.vector.index.kinds import SearchKind

_SMOOTHING = 0.1  # weight of the latest measurement in the time of an extend
_ROUNDING = 1e-9
_ANY = 1 << 60  # extends, more than any search has
_PREFILL, _DECODE, _LINK = SearchKind.PREFILL, SearchKind.DECODE, SearchKind.LINK  # looked up often


@section("search")
class SchedulerSettings:
    """Bounds of the queues, the share of prefill and flush timeouts."""

    # Half of the places for prefill missed two to four times as many deadlines: a prefill search
    # takes a place in time by its slack (LOG.md, "What the reserved share costs").
    share: Share = 0.0  # of free places, reserved for prefill
    # wait after which a prefill search takes a decode search's place; 5 missed many times as many
    # deadlines in the same loads
    park_after_ms: NonNegative = 50.0
    gather_min: Positive = 1  # searches that are admitted together if places are free
    # longest wait of a prefill search for others to gather
    flush_ms: NonNegative = 5.0
    global_flush_ms: NonNegative = 20.0  # longest such wait of any search
    queue_max: Positive = 4_096  # waiting searches of a class; more are refused
    drops_late: bool = False  # refuse prefill searches that can no longer meet their deadline
    parked_max: Natural = 64
    ms_per_extend: NonNegative = 0.05  # initial value of the measured average

    def __post_init__(self) -> None:
        if self.flush_ms > self.global_flush_ms:
            raise ConfigError(
                f"flush_ms: expected at most global_flush_ms ({self.global_flush_ms:g}), which "
                f"bounds the wait of all searches, found {self.flush_ms:g}"
            )


class Drop(StrEnum):
    """Why a search is refused."""

    QUEUE_FULL = "queue_full"
    DEADLINE_PASSED = "deadline_passed"
    TOO_LATE = "too_late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A search in a slot."""

    slot: int
    kind: SearchKind
    extends_left: int
    may_park: bool = True  # it has not been parked before


@dataclass(slots=True)
class Plan:
    """The steps of one tick, in this order: park, resume, admit; `dropped` are refused."""

    admit: list[QueuedSearch] = field(default_factory=list)
    park: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)
    dropped: list[tuple[QueuedSearch, Drop]] = field(default_factory=list)
    wake_ms: float = NEVER_MS  # when to plan again if nothing happens before


@dataclass(slots=True)
class _FreeSpace:
    """The free places and slots while a plan is made."""

    places: int
    slots: int


class SearchScheduler:
    """The queues of one engine."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.ms_per_extend = settings.ms_per_extend
        self.queues = SearchQueues()
        self._admits_at_once = settings.gather_min == 1 and not settings.drops_late
        self._links_run = False  # whether links may be running
        self._credit = 1 - settings.share  # prefill's, in places that become free one at a time

    def __len__(self) -> int:
        return len(self.queues)

    def waiting(self, kind: SearchKind) -> int:
        """Return the number of waiting searches of a class."""
        return self.queues.counts[kind]

    def arrive(self, item: QueuedSearch, now_ms: float) -> Drop | None:
        """Queue a search, or return why it is refused."""
        if item.deadline_ms <= now_ms:
            return Drop.DEADLINE_PASSED
        if self.queues.counts[item.kind] >= self.settings.queue_max:
            return Drop.QUEUE_FULL
        self.queues.add(item)
        return None

    def admits_at_once(self, item: QueuedSearch) -> bool:
        """Return whether a plan would just admit a search that arrives now, provided that a place
        is free and no search is parked."""
        return (
            not self.queues.total
            and self._admits_at_once
            and item.kind is not _LINK
            and item.deadline_ms > item.arrived_ms
        )

    def idle_until_ms(self, now_ms: float, max_extends: Callable[[], int]) -> float:
        """Return when a plan would do something even if no place becomes free; see `plan`."""
        if self._links_run and self.queues.total:
            return now_ms
        wake_ms = self.queues.next_deadline_ms()
        if self.queues.counts[_PREFILL]:
            wake_ms = min(wake_ms, self._urgent_at_ms(max_extends, now_ms))
        return wake_ms

    def add_measurement(self, ms_per_extend: float) -> None:
        """Add the time of one extend of a batch to the moving average."""
        self.ms_per_extend += _SMOOTHING * (ms_per_extend - self.ms_per_extend)

    def plan(
        self,
        now_ms: float,
        free_places: int,
        free_slots: int,
        running: Iterable[Running] = (),
        parked: Sequence[Running] = (),
        max_extends: Callable[[], int] = lambda: _ANY,
    ) -> Plan:
        """Plan the use of `free_places` of the batch; a parked search keeps its slot.

        `parked` is in the order of parking. `free_slots` is the number of slots without a search.
        `running` is read only if a search may be preempted: no search has more than `max_extends()`
        extends left, so a search with more slack than these take is not urgent.
        """
        plan = Plan()
        self._drop_expired(plan, now_ms)
        if self.settings.gather_min == 1 or not self._must_gather(now_ms, plan, bool(parked)):
            free = _FreeSpace(free_places, free_slots)
            if self._links_run:
                running = list(running)
                self._displace(plan, free, running, parked)
            if free.places:
                self._fill(plan, free, parked)
            if not free.places and self.queues.counts[_PREFILL]:
                urgent_ms = self._urgent_at_ms(max_extends, now_ms)
                if now_ms >= urgent_ms:
                    self._preempt(plan, free, running, len(parked), now_ms)
                else:
                    plan.wake_ms = min(plan.wake_ms, urgent_ms)
        plan.wake_ms = min(plan.wake_ms, self.queues.next_deadline_ms())
        return plan

    def _must_gather(self, now_ms: float, plan: Plan, has_parked: bool) -> bool:
        """Return whether to wait for more arrivals; then `plan.wake_ms` is the end of the wait."""
        waiting = len(self)
        if has_parked or not waiting or waiting >= self.settings.gather_min:
            return False
        oldest_prefill_ms, oldest_ms = self.queues.oldest_ms()
        flush_ms, global_flush_ms = self.settings.flush_ms, self.settings.global_flush_ms
        wake_ms = min(oldest_prefill_ms + flush_ms, oldest_ms + global_flush_ms)
        if now_ms >= wake_ms:
            return False
        plan.wake_ms = wake_ms
        return True

    def _displace(
        self, plan: Plan, free: _FreeSpace, running: Sequence[Running], parked: Sequence[Running]
    ) -> None:
        """Park links for searches that would find no place."""
        links = [search for search in running if search.kind is SearchKind.LINK]
        self._links_run = bool(links)
        shortage = (
            self.queues.counts[SearchKind.PREFILL]
            + self.queues.counts[SearchKind.DECODE]
            - free.places
        )
        shortage += sum(search.kind is not SearchKind.LINK for search in parked)
        limit = min(shortage, free.slots, self.settings.parked_max - len(parked))
        for link in [link for link in links if link.may_park][: max(0, limit)]:
            plan.park.append(link.slot)
            free.places += 1

    def _fill(self, plan: Plan, free: _FreeSpace, parked: Sequence[Running]) -> None:
        """Fill prefill's reserved places, then resume parked searches, then admit by class."""
        links, searches = parked, parked
        if parked:
            links = [search for search in parked if search.kind is _LINK]
            searches = [search for search in parked if search.kind is not _LINK]
        queues, counts = self.queues, self.queues.counts
        if counts[_PREFILL]:
            decode_waits = bool(searches) or bool(counts[_DECODE])
            self._admit_prefill(plan, free, self._reserved(free.places, decode_waits))
        if searches:
            self._resume(plan, free, searches)
        if counts[_DECODE]:
            self._admit(plan, free, queues.decode)
        if counts[_PREFILL]:
            self._admit_prefill(plan, free, free.places)
            self._admit(plan, free, queues.late)
        if links:
            self._resume(plan, free, links)
        if counts[_LINK] and self._admit(plan, free, queues.link):
            self._links_run = True

    def _resume(self, plan: Plan, free: _FreeSpace, parked: Sequence[Running]) -> None:
        for search in parked[: free.places]:
            plan.resume.append(search.slot)
            free.places -= 1
            self._links_run = self._links_run or search.kind is SearchKind.LINK

    def _admit(self, plan: Plan, free: _FreeSpace, queue: Fifo) -> int:
        """Admit the first searches of a queue while there is room; return their number."""
        admitted_count = self.queues.take(queue, min(free.places, free.slots), plan.admit)
        free.places -= admitted_count
        free.slots -= admitted_count
        return admitted_count

    def _admit_prefill(self, plan: Plan, free: _FreeSpace, limit: int) -> None:
        """Admit up to `limit` prefill searches, those with the least slack first."""
        for _ in range(min(limit, free.places, free.slots)):
            item = self.queues.take_prefill(self.ms_per_extend)
            if item is None:
                return
            plan.admit.append(item)
            free.places -= 1
            free.slots -= 1

    def _reserved(self, places: int, decode_waits: bool) -> int:
        """Return the number of free places that are reserved for prefill."""
        share = self.settings.share
        if not decode_waits or share >= 1:
            return places
        if places > 1:
            return min(math.ceil(share * places), places - 1)
        if not places or not share or not self.queues.counts[SearchKind.PREFILL]:
            return 0
        self._credit += share
        if self._credit < 1 - _ROUNDING:
            return 0
        self._credit -= 1
        return 1

    def _drop_expired(self, plan: Plan, now_ms: float) -> None:
        """Drop searches past their deadline; move those that can no longer meet it to `late`."""
        if self.queues.next_deadline_ms() <= now_ms:
            for late in self.queues.pop_expired(now_ms):
                self.queues.mark_left(late)
                plan.dropped.append((late, Drop.DEADLINE_PASSED))
        while self.queues.counts[_PREFILL]:
            item = self.queues.prefill.head(self.ms_per_extend)
            if item is None or item.slack_ms(now_ms, self.ms_per_extend) >= 0:
                return
            self.queues.prefill.pop(item)
            if self.settings.drops_late:
                self.queues.mark_left(item)
                plan.dropped.append((item, Drop.TOO_LATE))
            else:
                self.queues.late.append(item)

    def _urgent_at_ms(self, max_extends: Callable[[], int], now_ms: float) -> float:
        """Return when a prefill search may become urgent, `now_ms` if its slack is too small."""
        head = self.queues.prefill.head(self.ms_per_extend)
        if head is None:
            return NEVER_MS
        if head.slack_ms(now_ms, self.ms_per_extend) < max_extends() * self.ms_per_extend:
            return now_ms
        return head.arrived_ms + self.settings.park_after_ms

    def _preempt(
        self, plan: Plan, free: _FreeSpace, running: Iterable[Running], parked: int, now_ms: float
    ) -> None:
        """Park links, then the longest decode searches, and admit urgent prefill searches."""
        running = list(running)
        victims = sorted(
            (
                r
                for r in running
                if r.kind is not SearchKind.PREFILL and r.may_park and r.slot not in plan.park
            ),
            key=lambda r: (r.kind is SearchKind.DECODE, -r.extends_left, r.slot),
        )
        limit = min(free.slots, self.settings.parked_max - parked - len(plan.park))
        next_free_ms = min((r.extends_left for r in running), default=0) * self.ms_per_extend
        for victim in victims[: max(0, limit)]:
            head = self.queues.prefill.head(self.ms_per_extend)
            if head is None:
                return
            is_urgent = head.slack_ms(now_ms, self.ms_per_extend) < next_free_ms
            park_at_ms = head.arrived_ms + self.settings.park_after_ms
            if not is_urgent and now_ms < park_at_ms:
                plan.wake_ms = min(plan.wake_ms, park_at_ms)
                return
            self.queues.prefill.pop(head)
            self.queues.mark_left(head)
            plan.park.append(victim.slot)
            plan.admit.append(head)
