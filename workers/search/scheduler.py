"""Which searches get the free places of the batch: two queues, a reserved share, preemption.

Trinity, section 3.3, and what it leaves open. Pure: time is an argument. `engine.py` calls `plan`
once per turn and does what it says; `control.py` moves the share and the flush timeout.

Theory of operation. Prefill searches wait by slack, that is deadline minus now minus the expected
time of their extends: least first. Decode searches wait first in, first out. Of B free places
ceil(share * B) are prefill's while it waits; what either class cannot use goes to the other at
once. Places mostly fall free one at a time, and of such places prefill gets its share as a running
count, with decode first in between. Prefill searches that can no longer meet their deadline wait
behind all others: saving one of them would only lose another. The third class, links
of new rows, gets what is left. A prefill search that has waited for the flush timeout, or would
lose its deadline by waiting for the next place to fall free, takes the place of a link or decode
search, which is parked and resumes before any new search of its class, with no work lost. Each
search is parked once at most. The flush timeouts matter also where places are free: up to
`gather_min` arrivals are gathered for one admission, but none waits longer than its timeout.

Slack is compared exactly although the time of an extend changes: searches with the same number of
extends keep their order by deadline whatever that time is, so there is one heap for each number,
and only the heaps' heads are compared.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any

from schemas.errors import ConfigError
from workers.search.query import Kind

_SMOOTHING = 0.1  # weight of the latest extend in the measured time
_NEVER_MS = math.inf
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds and shares; `share` and `flush_ms` are what the control loop moves."""

    share: float = 0.5  # of free places, reserved for prefill
    flush_ms: float = 5.0  # the longest a prefill search waits before it takes a decode place
    global_flush_ms: float = 20.0  # the longest any search waits for others to be admitted with
    gather_min: int = 1  # searches that are admitted together where places are free
    queue_max: int = 4_096  # waiting searches of a class; more are refused
    drops_late: bool = False  # refuse prefill searches that can no longer meet their deadline
    parked_max: int = 64
    ms_per_extend: float = 0.05  # until it is measured

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"search.share: expected 0 to 1, found {self.share}")
        for name in ("gather_min", "queue_max"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"search.{name}: expected at least 1, found {getattr(self, name)}"
                )
        for name in ("flush_ms", "global_flush_ms", "parked_max", "ms_per_extend"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"search.{name}: expected at least 0, found {getattr(self, name)}"
                )


class Drop(StrEnum):
    """Why a search is refused."""

    QUEUE_FULL = "queue_full"
    DEADLINE_PASSED = "deadline_passed"
    TOO_LATE = "too_late"


@dataclass(slots=True, eq=False, kw_only=True)
class Item:
    """A waiting search; `search` is the caller's."""

    kind: Kind
    extends: int  # expected in all
    arrived_ms: float
    deadline_ms: float = _NEVER_MS
    search: Any = None
    is_gone: bool = False  # cancelled while it waited

    def slack_ms(self, now_ms: float, ms_per_extend: float) -> float:
        """Time that may pass before the search has to start."""
        return self.deadline_ms - now_ms - self.extends * ms_per_extend


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A search in a slot."""

    slot: int
    kind: Kind
    extends_left: int
    may_park: bool = True  # it has not been parked before


@dataclass(slots=True)
class Plan:
    """What to do this turn, in this order: park, resume, admit; `dropped` end with the reason."""

    admit: list[Item] = field(default_factory=list)
    park: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)
    dropped: list[tuple[Item, Drop]] = field(default_factory=list)
    wake_ms: float = _NEVER_MS  # when to plan again though nothing happens


@dataclass(slots=True)
class _Room:
    """What is free while a plan is made."""

    places: int
    slots: int


_Take = Callable[[float], Item | None]


class Scheduler:
    """The queues of one engine."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.share, self.flush_ms = settings.share, settings.flush_ms
        self.ms_per_extend = settings.ms_per_extend
        self._prefill: dict[int, list[tuple[float, int, Item]]] = {}  # heaps, by extends
        self._late: deque[Item] = deque()
        self._decode: deque[Item] = deque()
        self._link: deque[Item] = deque()
        self._counts = dict.fromkeys(Kind, 0)
        self._credit = 1 - self.share  # of prefill, in places that fall free one at a time
        self._serial = 0

    def __len__(self) -> int:
        return sum(self._counts.values())

    def waiting(self, kind: Kind) -> int:
        """Searches of a class that wait."""
        return self._counts[kind]

    def arrive(self, item: Item, now_ms: float) -> Drop | None:
        """Take a search; or why not."""
        if item.deadline_ms <= now_ms:
            return Drop.DEADLINE_PASSED
        if self._counts[item.kind] >= self.settings.queue_max:
            return Drop.QUEUE_FULL
        self._counts[item.kind] += 1
        if item.kind is Kind.PREFILL:
            self._serial += 1
            heap = self._prefill.setdefault(item.extends, [])
            heappush(heap, (item.deadline_ms, self._serial, item))
        else:
            (self._decode if item.kind is Kind.DECODE else self._link).append(item)
        return None

    def cancel(self, item: Item) -> None:
        """The search is not wanted any more; it must wait here still."""
        assert not item.is_gone
        item.is_gone = True
        self._counts[item.kind] -= 1

    def measured(self, ms_per_extend: float) -> None:
        """One extend of a search took so long."""
        self.ms_per_extend += _SMOOTHING * (ms_per_extend - self.ms_per_extend)

    def plan(
        self,
        now_ms: float,
        free_places: int,
        free_slots: int,
        running: Sequence[Running] = (),
        parked: Sequence[Running] = (),
    ) -> Plan:
        """Fill `free_places` of the batch; a search that is parked keeps its slot meanwhile.

        `parked` is in the order of parking. `free_slots` is how many slots hold no search at all.
        """
        plan = Plan()
        self._drop_expired(plan, now_ms)
        if self._gathers(now_ms, plan, bool(parked)):
            return plan
        room = _Room(free_places, free_slots)
        self._fill(plan, room, parked, now_ms)
        if not room.places:
            self._preempt(plan, room, running, len(parked), now_ms)
        return plan

    def _gathers(self, now_ms: float, plan: Plan, others: bool) -> bool:
        """Whether to wait for more arrivals; then `plan.wake_ms` says until when."""
        waiting = len(self)
        if others or not waiting or waiting >= self.settings.gather_min:
            return False
        oldest_prefill = min((item.arrived_ms for item in self._all_prefill()), default=_NEVER_MS)
        rest = (queue[0].arrived_ms for queue in (self._decode, self._link) if queue)
        oldest = min((oldest_prefill, *rest))
        wake_ms = min(oldest_prefill + self.flush_ms, oldest + self.settings.global_flush_ms)
        if now_ms >= wake_ms:
            return False
        plan.wake_ms = wake_ms
        return True

    def _fill(self, plan: Plan, room: _Room, parked: Sequence[Running], now_ms: float) -> None:
        """Prefill's own places, then those parked before, then everybody in order of class."""
        decode_waits = bool(parked) or bool(self._counts[Kind.DECODE])
        reserved = self._reserved(room.places, decode_waits)
        self._admit(plan, room, self._next_prefill, reserved, now_ms)
        for search in parked[: room.places]:
            plan.resume.append(search.slot)
            room.places -= 1
        for take in (self._next_decode, self._next_prefill, self._next_late, self._next_link):
            self._admit(plan, room, take, room.places, now_ms)

    def _admit(
        self,
        plan: Plan,
        room: _Room,
        take: Callable[[float], Item | None],
        most: int,
        now_ms: float,
    ) -> None:
        for _ in range(min(most, room.places, room.slots)):
            item = take(now_ms)
            if item is None:
                return
            plan.admit.append(item)
            room.places -= 1
            room.slots -= 1

    def _reserved(self, places: int, decode_waits: bool) -> int:
        """Places of prefill's own."""
        if not decode_waits or self.share >= 1:
            return places
        if places > 1:
            return min(math.ceil(self.share * places), places - 1)
        if not places or not self.share or not self._counts[Kind.PREFILL]:
            return 0
        self._credit += self.share
        if self._credit < 1 - _ROUNDING:
            return 0
        self._credit -= 1
        return 1

    def _next_prefill(self, now_ms: float) -> Item | None:
        """The search with the least slack that can still meet its deadline."""
        while True:
            best = self._head(now_ms)
            if best is None:
                return None
            item = self._pop(best)
            if item.slack_ms(now_ms, self.ms_per_extend) >= 0:
                self._counts[Kind.PREFILL] -= 1
                return item
            self._late.append(item)

    def _head(self, now_ms: float) -> int | None:
        """The heap whose head has the least slack; what was cancelled leaves the heads."""
        best, least = None, _NEVER_MS
        for extends in list(self._prefill):
            heap = self._prefill[extends]
            while heap and heap[0][2].is_gone:
                heappop(heap)
            if not heap:
                del self._prefill[extends]
                continue
            slack_ms = heap[0][2].slack_ms(now_ms, self.ms_per_extend)
            if best is None or slack_ms < least:
                best, least = extends, slack_ms
        return best

    def _pop(self, extends: int) -> Item:
        item = heappop(self._prefill[extends])[2]
        if not self._prefill[extends]:
            del self._prefill[extends]
        return item

    def _next_decode(self, now_ms: float) -> Item | None:
        return self._first(self._decode)

    def _next_late(self, now_ms: float) -> Item | None:
        return self._first(self._late)

    def _next_link(self, now_ms: float) -> Item | None:
        return self._first(self._link)

    def _first(self, queue: deque[Item]) -> Item | None:
        while queue:
            item = queue.popleft()
            if not item.is_gone:
                self._counts[item.kind] -= 1
                return item
        return None

    def _drop_expired(self, plan: Plan, now_ms: float) -> None:
        """End what waited past its deadline, wherever it is first in line."""
        for queue in (self._decode, self._link, self._late):
            while queue and (queue[0].is_gone or queue[0].deadline_ms <= now_ms):
                self._dropped(plan, queue.popleft(), Drop.DEADLINE_PASSED)
        for extends in list(self._prefill):
            while extends in self._prefill:
                item = self._prefill[extends][0][2]
                late = item.slack_ms(now_ms, self.ms_per_extend) < 0
                if not item.is_gone and item.deadline_ms > now_ms and not late:
                    break
                self._pop(extends)
                if late and item.deadline_ms > now_ms and not self.settings.drops_late:
                    if not item.is_gone:
                        self._late.append(item)
                else:
                    passed = item.deadline_ms <= now_ms
                    self._dropped(plan, item, Drop.DEADLINE_PASSED if passed else Drop.TOO_LATE)

    def _dropped(self, plan: Plan, item: Item, why: Drop) -> None:
        if not item.is_gone:
            self._counts[item.kind] -= 1
            plan.dropped.append((item, why))

    def _preempt(
        self, plan: Plan, room: _Room, running: Sequence[Running], parked: int, now_ms: float
    ) -> None:
        """Urgent prefill searches take the places of links, then of the longest decode searches."""
        victims = sorted(
            (r for r in running if r.kind is not Kind.PREFILL and r.may_park),
            key=lambda r: (r.kind is Kind.DECODE, -r.extends_left, r.slot),
        )
        most = min(room.slots, self.settings.parked_max - parked)
        next_free_ms = min((r.extends_left for r in running), default=0) * self.ms_per_extend
        for victim in victims[: max(0, most)]:
            head = self._head(now_ms)
            if head is None:
                return
            item = self._prefill[head][0][2]
            urgent = item.slack_ms(now_ms, self.ms_per_extend) < next_free_ms
            if not urgent and now_ms - item.arrived_ms < self.flush_ms:
                plan.wake_ms = min(plan.wake_ms, item.arrived_ms + self.flush_ms)
                return
            taken = self._next_prefill(now_ms)
            if taken is None:
                return
            plan.park.append(victim.slot)
            plan.admit.append(taken)

    def _all_prefill(self) -> Iterator[Item]:
        for heap in self._prefill.values():
            yield from (entry[2] for entry in heap if not entry[2].is_gone)
        yield from (item for item in self._late if not item.is_gone)
